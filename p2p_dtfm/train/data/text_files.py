"""Which files under the given paths hold text, and their text in pieces of bounded size."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.blob_store import BLOBS_NAME, keeps_blobs
from p2p_dtfm.train.data.saved_data_sets import data_set_files

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""What some systems begin a UTF-8 file with."""


class NotText(Exception):
    """The file holds a zero byte or is not UTF-8."""


@dataclass
class Skipped:
    """Files and rows left out, by reason, with the first few examples of some."""

    not_text: int = 0
    without_field: int = 0
    """Files whose rows do not have the text field."""
    rows_without_text: int = 0
    broken_lines: int = 0
    broken_line_examples: list[str] = field(default_factory=list)
    empty: int = 0
    hidden: int = 0
    links: int = 0
    special: int = 0
    prepared: int = 0
    """Folders of tokens that `prepare` wrote, or a daemon keeps."""
    unreadable: int = 0
    unreadable_examples: list[str] = field(default_factory=list)

    def note_unreadable(self, error: OSError) -> None:
        self.unreadable += 1
        if len(self.unreadable_examples) < 3:
            self.unreadable_examples.append(f"{error.filename}: {error.strerror}")

    def note_broken(self, where: str) -> None:
        self.broken_lines += 1
        if len(self.broken_line_examples) < 3:
            self.broken_line_examples.append(where)

    def __str__(self) -> str:
        counts = [
            (self.not_text, "not text"),
            (self.without_field, "without the text field"),
            (self.rows_without_text, "rows without text"),
            (self.broken_lines, f"broken lines ({'; '.join(self.broken_line_examples)})"),
            (self.empty, "empty"),
            (self.hidden, "hidden"),
            (self.links, "symbolic links"),
            (self.special, "not regular files"),
            (self.prepared, "prepared data"),
            (self.unreadable, "unreadable"),
        ]
        return ", ".join(f"{count} {reason}" for count, reason in counts if count) or "none"


@dataclass(frozen=True)
class Candidate:
    """A regular file that may hold text. `named` if the user named it, not just its directory."""

    path: Path
    size_bytes: int
    named: bool
    held_out: bool = False
    """Whether the user named the file, or its directory, for evaluation."""


def find_files(
    paths: list[Path], held_out_paths: list[Path], leave_out: Path, skipped: Skipped
) -> list[Candidate]:
    """Regular files in a fixed order: paths as given, each directory sorted by name, depth first.

    Inside directories, hidden entries and symbolic links are skipped and counted: links can loop
    and lead to the same text twice. A path that the user names may itself be a link. No file comes
    twice. Only the tables are taken of a data set that `datasets.save_to_disk` wrote. Nothing is
    taken of prepared data: tokens of bytes look like text. `leave_out` is the output directory.
    Raises `UserError` for a path that cannot be read.
    """
    found: list[Candidate] = []
    seen: set[tuple[int, int]] = set()
    excluded = _identity(leave_out)
    for path, held_out in [*((p, True) for p in held_out_paths), *((p, False) for p in paths)]:
        try:
            status = path.stat()
        except OSError as error:
            raise UserError(
                f"cannot read {path}: {error.strerror}", "check the path and its permissions"
            ) from error
        if stat.S_ISDIR(status.st_mode):
            candidates = _walk(path, excluded, skipped)
        elif stat.S_ISREG(status.st_mode):
            candidates = iter([(path, status)])
        else:
            raise UserError(
                f"{path} is neither a file nor a directory", "name text files or directories"
            )
        named = not stat.S_ISDIR(status.st_mode)
        for file, file_status in candidates:
            identity = (file_status.st_dev, file_status.st_ino)
            if identity in seen:
                continue
            seen.add(identity)
            if file_status.st_size == 0:
                skipped.empty += 1
            else:
                found.append(Candidate(file, file_status.st_size, named, held_out))
    return found


def read_pieces(path: Path, piece_bytes: int) -> Iterator[bytes]:
    """The file in order, in pieces of at most `piece_bytes`; without a mark of byte order.

    A piece ends after a newline if there is one in its second half, and never within a character.
    Raises `NotText` (perhaps after some pieces) and OSError.
    """
    rest = b""
    with open(path, "rb") as file:
        if file.read(len(BYTE_ORDER_MARK)) != BYTE_ORDER_MARK:
            file.seek(0)
        while True:
            block = file.read(piece_bytes - len(rest))
            rest += block
            if not rest:
                return
            end = _cut(rest, piece_bytes) if block else len(rest)
            if not is_text(rest[:end]):
                raise NotText
            yield rest[:end]
            rest = rest[end:]


def split_text(text: bytes, piece_bytes: int) -> Iterator[bytes]:
    """Cuts a text that is in memory into the same pieces."""
    start = 0
    while start < len(text):
        piece = text[start : start + piece_bytes]
        end = _cut(piece, piece_bytes) if start + len(piece) < len(text) else len(piece)
        yield piece[:end]
        start += end


def _cut(text: bytes, piece_bytes: int) -> int:
    """Where to end a piece behind which more text may follow."""
    if len(text) < piece_bytes:
        return _character_boundary(text)
    newline = text.rfind(b"\n", len(text) // 2)
    return newline + 1 if newline >= 0 else _character_boundary(text)


def _character_boundary(text: bytes) -> int:
    """The end of the last whole UTF-8 character (of text that is UTF-8)."""
    for back in range(1, min(4, len(text)) + 1):
        byte = text[-back]
        if byte < 0x80:
            return len(text)
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            whole = len(text) if back >= length else len(text) - back
            return whole or len(text)
    return len(text)


def is_text(piece: bytes) -> bool:
    """Whether this is UTF-8 without zero bytes."""
    if 0 in piece:
        return False
    try:
        piece.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _walk(
    top: Path, excluded: tuple[int, int] | None, skipped: Skipped
) -> Iterator[tuple[Path, os.stat_result]]:
    """Regular files below `top`. An explicit stack, since directories may nest without end."""
    pending = [iter(_entries(top, excluded, skipped))]
    while pending:
        entry = next(pending[-1], None)
        if entry is None:
            pending.pop()
            continue
        if entry.name.startswith(".") or entry.name == "__pycache__":
            skipped.hidden += 1
            continue
        try:
            status = entry.stat(follow_symlinks=False)
        except OSError as error:
            skipped.note_unreadable(error)
            continue
        if stat.S_ISLNK(status.st_mode):
            skipped.links += 1
        elif stat.S_ISDIR(status.st_mode):
            pending.append(iter(_entries(Path(entry.path), excluded, skipped)))
        elif stat.S_ISREG(status.st_mode):
            yield Path(entry.path), status
        else:
            skipped.special += 1


def _entries(
    folder: Path, excluded: tuple[int, int] | None, skipped: Skipped
) -> list["os.DirEntry[str]"]:
    if excluded is not None and _identity(folder) == excluded:
        return []
    try:
        with os.scandir(folder) as entries:
            found = sorted(entries, key=lambda entry: os.fsencode(entry.name))
    except OSError as error:
        skipped.note_unreadable(error)
        return []
    names = {entry.name for entry in found}
    if BLOBS_NAME in names and keeps_blobs(folder):
        skipped.prepared += 1  # with the files that describe them
        return [
            entry
            for entry in found
            if entry.name != BLOBS_NAME and not entry.name.endswith(".json")
        ]
    tables = data_set_files(folder, names)
    return found if tables is None else [entry for entry in found if entry.name in tables]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return (status.st_dev, status.st_ino)


_FIELDS_SHOWN = 12


class TextRow(NamedTuple):
    """The text of a row, if it has any, and how far into the file the row is."""

    text: bytes | None
    read_bytes: int
    line: int = 0
    """The row's number in a file of lines, from 1."""


class NoTextField(Exception):
    """The rows of a file have no such field, or it holds no text."""

    def __init__(self, path: Path, field: str, fields: list[str]) -> None:
        self.fields = fields
        shown = ", ".join(fields[:_FIELDS_SHOWN]) or "none"
        super().__init__(f"the rows of {path} have no text field {field!r}; their fields: {shown}")
