"""Documents out of files: text, JSON lines, Parquet and Arrow, in pieces of bounded size.

A text file is one document; one longer than a piece counts as several, since else the text of a
single big file could not be split into training and held-out text. In the other forms a document is
the text field of a row, and is never split between the two.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.text_files import (
    Candidate,
    NoTextField,
    Row,
    Skipped,
    is_text,
    read_pieces,
    split_text,
)

LINE_LIMIT_BYTES = 1 << 26


class Form(Enum):
    """How a file holds text."""

    TEXT = "text"
    JSON_LINES = "JSON lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


_FORMS = {
    ".jsonl": Form.JSON_LINES,
    ".ndjson": Form.JSON_LINES,
    ".parquet": Form.PARQUET,
    ".arrow": Form.ARROW,
}


@dataclass(frozen=True)
class Piece:
    """A part of a document, or all of it."""

    text: bytes
    key: int
    """A hash of the content; pieces with low ones are held out."""
    ends_document: bool
    read_bytes: int
    """How far into the file this is."""


def form_of(path: Path) -> Form:
    """By the ending of its name; what has none of the known ones is taken for text."""
    return _FORMS.get(path.suffix.lower(), Form.TEXT)


def read_documents(
    file: Candidate, field: str, piece_bytes: int, skipped: Skipped
) -> Iterator[Piece]:
    """The pieces of a file's documents, in order.

    `field`: the name of the rows' text, where there are rows. Rows without text are left out, and
    counted in `skipped`. Raises `NotText`, `NoTextField` and OSError, perhaps after some pieces,
    and `UserError`.
    """
    form = form_of(file.path)
    if form is Form.TEXT:
        return _text_file(file.path, piece_bytes)
    if form is Form.JSON_LINES:
        return _rows(_json_lines(file.path, field, skipped), piece_bytes, skipped)
    return _rows(_columns(file, form, field), piece_bytes, skipped)


def _text_file(path: Path, piece_bytes: int) -> Iterator[Piece]:
    """One piece behind, since only then is it known which is the last."""
    held: bytes | None = None
    number = read_bytes = 0
    for text in read_pieces(path, piece_bytes):
        if held is not None:
            yield Piece(held, _key(held, number), False, read_bytes)
            number += 1
        held = text
        read_bytes += len(text)
    if held is not None:
        yield Piece(held, _key(held, number), True, read_bytes)


def _rows(rows: Iterator[Row], piece_bytes: int, skipped: Skipped) -> Iterator[Piece]:
    for text, read_bytes in rows:
        if not text or not is_text(text):
            skipped.rows_without_text += 1
            continue
        key = _key(text, 0)
        pieces = list(split_text(text, piece_bytes))
        for number, piece in enumerate(pieces, 1):
            yield Piece(piece, key, number == len(pieces), read_bytes)


def _key(text: bytes, number: int) -> int:
    # With its number in the file, the repeats within one monotonous file fall on either side.
    salt = number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")


def _json_lines(path: Path, field: str, skipped: Skipped) -> Iterator[Row]:
    read_bytes = number = 0
    known = False
    with open(path, "rb") as file:
        while line := file.readline(LINE_LIMIT_BYTES + 1):
            number += 1
            read_bytes += len(line)
            if len(line) > LINE_LIMIT_BYTES:
                raise UserError(
                    f"line {number} of {path} is longer than {LINE_LIMIT_BYTES >> 20} MiB",
                    "cut its text into several lines",
                )
            if not line.strip():
                continue
            row = _json_object(line)
            if row is None:
                skipped.note_broken(f"{path}, line {number}")
                continue
            if not known and field not in row:
                raise NoTextField(path, field, sorted(row))
            known = True
            value = row.get(field)
            yield value.encode("utf-8") if isinstance(value, str) else None, read_bytes


def _json_object(line: bytes) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _columns(file: Candidate, form: Form, field: str) -> Iterator[Row]:
    """The text column of a table, a few rows at a time."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"reading {file.path} needs pyarrow, which is not installed here",
            ("install it: pip install pyarrow", "or write the data as JSON lines"),
        ) from None
    from p2p_dtfm.train.data.tables import read_column

    try:
        yield from read_column(file.path, form is Form.PARQUET, field, file.size_bytes)
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{file.path} is not a whole {form.value} file: {error}",
            "fetch or write it again, or leave it out",
        ) from error
