"""Documents out of files: text, JSON lines, Parquet and Arrow, in pieces of bounded size.

A text file is one document. If it is longer than a piece, its pieces count as several: else the
text of a single big file could not be split into training and held-out text. In the other forms a
document is the text field of a row, and is never split between the two.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.data.formats.compressed import inner_name, is_compressed, open_lines
from p2p_dtfm.train.data.text_files import (
    BYTE_ORDER_MARK,
    Candidate,
    NoTextField,
    Skipped,
    TextRow,
    is_text,
    read_pieces,
    split_text,
)

LINE_LIMIT_BYTES = 1 << 26
LINES_OF_ARRAY = "jq -c '.[]' FILE.json > FILE.jsonl"
_ROWS_WITHOUT_FIELD = 1000
"""If so many rows without the field come first, a file of lines is taken to have no such field."""


class Form(Enum):
    """How a file holds text."""

    TEXT = "text"
    JSON_LINES = "JSON lines"
    PARQUET = "Parquet"
    ARROW = "Arrow"


USUAL_FIELD, RED_PAJAMA_FIELD = "text", "raw_content"
"""The name of a row's text field, unless the user says another; RedPajama-V2 has the second."""

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
    """A hash of the content; pieces with low keys are held out."""
    ends_document: bool
    read_bytes: int
    """How far into the file this piece reaches."""
    line: int = 0
    """The row's number in a file of lines, from 1."""


def form_of(path: Path) -> Form:
    """The form by the ending of the file's name; a name with no known ending means text. `.json`
    may be either."""
    if not is_compressed(path):
        if path.suffix.lower() == ".json" and _begins_with_rows(path):
            return Form.JSON_LINES
        return _FORMS.get(path.suffix.lower(), Form.TEXT)
    inner = Path(inner_name(path)).suffix
    is_rows = inner == ".json" or _FORMS.get(inner) is Form.JSON_LINES
    return Form.JSON_LINES if is_rows else Form.TEXT


def _begins_with_rows(path: Path) -> bool:
    """Whether each of the first two lines is an object. Data sets in lines are often called
    `.json`; a configuration has other lines, or a single one."""
    try:
        with path.open("rb") as file:
            first, second = (file.readline(LINE_LIMIT_BYTES + 1) for _ in range(2))
    except OSError:
        return False  # the reading itself says why
    lines = (first.removeprefix(BYTE_ORDER_MARK), second)
    return all(_json_object(line) is not None for line in lines)


def require_rows(files: list[Candidate], field: str) -> None:
    """If the user names a field, some file must have rows. Raises `UserError`."""
    if field == USUAL_FIELD or not files:
        return
    if all(form_of(file.path) is Form.TEXT for file in files):
        raise UserError(
            f"--field {field} names a field of rows, and no file has any: {files[0].path}",
            (
                "name files of lines, each an object (.jsonl or .json), or Parquet or Arrow",
                f"make lines of a JSON array: {LINES_OF_ARRAY}",
                "leave out --field: files are learnt as they are",
            ),
        )


def read_documents(
    file: Candidate, field: str, piece_bytes: int, skipped: Skipped, by_document: bool = False
) -> Iterator[Piece]:
    """The pieces of a file's documents, in order.

    `by_document`: all pieces of a text file have one key, so they are held out together or not.
    `field`: the name of the rows' text, where there are rows. Rows without text are left out, and
    counted in `skipped`. Raises `NotText`, `NoTextField` and OSError, perhaps after some pieces,
    and `UserError`.
    """
    form = form_of(file.path)
    if form is Form.TEXT:
        return _text_file(file.path, piece_bytes, by_document)
    if form is Form.JSON_LINES:
        return _rows(_json_lines(file.path, field, skipped), piece_bytes, skipped)
    return _rows(_columns(file, form, field), piece_bytes, skipped)


def _text_file(path: Path, piece_bytes: int, by_document: bool) -> Iterator[Piece]:
    """Pieces of a text file, each yielded when the next is read: only then is the last one
    known."""
    held: bytes | None = None
    first_key: int | None = None
    number = read_bytes = 0

    def piece(text: bytes, is_last: bool) -> Piece:
        nonlocal first_key
        key = first_key if by_document and first_key is not None else _key(text, number)
        first_key = key if first_key is None else first_key
        return Piece(text, key, is_last, read_bytes)

    for text in read_pieces(path, piece_bytes):
        if held is not None:
            yield piece(held, False)
            number += 1
        held = text
        read_bytes += len(text)
    if held is not None:
        yield piece(held, True)


def _rows(rows: Iterator[TextRow], piece_bytes: int, skipped: Skipped) -> Iterator[Piece]:
    for text, read_bytes, line in rows:
        if not text or not is_text(text):
            skipped.rows_without_text += 1
            continue
        key = _key(text, 0)
        pieces = list(split_text(text, piece_bytes))
        for number, piece in enumerate(pieces, 1):
            yield Piece(piece, key, number == len(pieces), read_bytes, line)


def _key(text: bytes, number: int) -> int:
    # The piece's number lets repeats within one monotonous file fall on either side.
    salt = number.to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, salt=salt).digest(), "little")


def _json_lines(path: Path, field: str, skipped: Skipped) -> Iterator[TextRow]:
    known = False
    before: list[TextRow] = []
    fields: dict[str, bool] = {}
    with open_lines(path, LINE_LIMIT_BYTES) as lines:
        for number, line in lines:
            if not line.strip():
                continue
            row = _json_object(line)
            if row is None:
                skipped.note_broken(f"{path}, line {number}")
                continue
            if not known and field == USUAL_FIELD and field not in row and RED_PAJAMA_FIELD in row:
                field = RED_PAJAMA_FIELD
            known = known or field in row
            if not known:
                fields |= {name: isinstance(value, str) for name, value in row.items()}
                before.append(TextRow(None, lines.read_bytes, number))
                if len(before) >= _ROWS_WITHOUT_FIELD:
                    break
                continue
            yield from before
            before = []
            value = row.get(field)
            text = value.encode("utf-8") if isinstance(value, str) else None
            yield TextRow(text, lines.read_bytes, number)
    if before:
        texts_first = sorted(fields, key=lambda name: (not fields[name], name))
        raise NoTextField(path, field, texts_first)


def _json_object(line: bytes) -> dict[str, object] | None:
    try:
        return msgspec.json.decode(line, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


def _columns(file: Candidate, form: Form, field: str) -> Iterator[TextRow]:
    """The text column of a table, a few rows at a time."""
    with pyarrow_needed(file.path, form):
        from p2p_dtfm.train.data.formats.tables import read_column

        yield from read_column(file.path, form is Form.PARQUET, field, file.size_bytes)


@contextmanager
def pyarrow_needed(path: Path, form: Form) -> Iterator[None]:
    """Around the reading of a table. Raises `UserError` where that is impossible, and OSError."""
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            f"reading {path} needs pyarrow, which is not installed here",
            (f"install it: {how_to_install('pyarrow')}", "or write the data as JSON lines"),
        ) from None
    try:
        yield
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise UserError(
            f"{path} is not a whole {form.value} file: {error}",
            "fetch or write it again, or leave it out",
        ) from error
