"""The first reading of the files: which files hold text, and which pieces are held out."""

import hashlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.documents import Piece, read_documents
from p2p_dtfm.train.data.manifest import Selection
from p2p_dtfm.train.data.text_files import Candidate, NoTextField, NotText, Skipped

Progress = Callable[[int, int, str], None]
"""Bytes done, bytes in all, and the stage: "choosing", "reading", "learning tokens", "writing"."""
PROGRESS_EVERY_PIECES = 256
_DIGIT_BITS = 16
_PART_PIECES = 1 << 16


def _hasher() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=32)


class Verdicts(Protocol):
    """What was found of each document when all documents were judged."""

    def kept(self, file: Candidate, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces of documents that are to be learnt."""
        ...


class Located(NamedTuple):
    """A piece, and where it lies."""

    file: int
    """The file's number among the survey's files."""
    number: int
    """The piece's number in that file, among the pieces that count."""
    piece: Piece
    held_out: bool


@dataclass
class Survey:
    """What the first reading found."""

    text_field: str
    """The name of the rows' text field."""
    piece_bytes: int
    files: list[Candidate] = field(default_factory=list)
    text_bytes: int = 0
    documents: int = 0
    threshold: int = -1
    """A piece is held out if its key is at most this, or if its file is."""
    by_document: bool = False
    """Whether a text file is held out as a whole or not at all."""
    verdicts: Verdicts | None = None
    """Which documents count; None if all do."""
    selection: Selection | msgspec.UnsetType = msgspec.UNSET
    """How many documents count, in figures."""
    content: "hashlib.blake2b" = field(default_factory=_hasher)
    """A hash of all pieces as they were read: a later command sees whether they are the same."""
    contents: "array[int]" = field(default_factory=lambda: array("Q"))
    """Eight bytes of the same for each file: a later reading sees whether the file is the same."""

    def pieces_of(self, file: Candidate, skipped: Skipped) -> Iterator[Piece]:
        """The pieces of a file's documents that count. Raises as `read_documents` does."""
        pieces = read_documents(file, self.text_field, self.piece_bytes, skipped, self.by_document)
        return pieces if self.verdicts is None else self.verdicts.kept(file, pieces)

    def located(self, first_file: int = 0, first_piece: int = 0) -> Iterator[Located]:
        """All pieces, or those from this piece of this file on. For a later reading, when nothing
        may be wrong with the files any more. Raises `UserError`."""
        for place, file in enumerate(self.files[first_file:], first_file):
            pieces_before = first_piece if place == first_file else 0
            content = _hasher()
            try:
                for number, piece in enumerate(self.pieces_of(file, Skipped())):
                    _add(content, piece)
                    if number >= pieces_before:
                        held_out = file.held_out or piece.key <= self.threshold
                        yield Located(place, number, piece, held_out)
            except (NotText, NoTextField, OSError) as error:
                raise changed(file, str(error)) from error
            if _short(content) != self.contents[place]:
                raise changed(file, "its text is another one")


def _add(content: "hashlib.blake2b", piece: Piece) -> None:
    content.update(b"%d %d %d " % (len(piece.text), piece.key, piece.ends_document))
    content.update(piece.text)


def _short(content: "hashlib.blake2b") -> int:
    return int.from_bytes(content.digest()[:8], "little")


def changed(file: Candidate, how: str) -> UserError:
    return UserError(f"{file.path} changed while it was being read: {how}", "run the command again")


class Pieces:
    """Key and size of each piece, in twelve bytes: there may be very many."""

    def __init__(self) -> None:
        self.keys, self.sizes_bytes = array("Q"), array("I")

    def add(self, piece: Piece) -> None:
        self.keys.append(piece.key)
        self.sizes_bytes.append(len(piece.text))

    def cut(self, count: int) -> None:
        """Forget all but the first `count`."""
        del self.keys[count:], self.sizes_bytes[count:]

    def parts(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        keys = np.frombuffer(self.keys, dtype=np.uint64)
        sizes_bytes = np.frombuffer(self.sizes_bytes, dtype=np.uint32)
        for first in range(0, len(keys), _PART_PIECES):
            yield keys[first : first + _PART_PIECES], sizes_bytes[first : first + _PART_PIECES]


@dataclass
class _FoundInFile:
    """What the first reading found in one file."""

    documents: int = 0
    text_bytes: int = 0
    content: "hashlib.blake2b" = field(default_factory=_hasher)


def read_first(
    survey: Survey,
    files: list[Candidate],
    held_out_fraction: float,
    context: int,
    progress: Progress,
    skipped: Skipped,
) -> None:
    """The first reading: finds out which files hold text, and which pieces are held out."""
    total_bytes = sum(file.size_bytes for file in files)
    pieces, done_bytes = Pieces(), 0

    def tell(read_bytes: int) -> None:
        progress(min(done_bytes + read_bytes, total_bytes), total_bytes, "reading")

    for file in files:
        before = len(pieces.keys)
        found = _read_file_first(file, survey, pieces, skipped, tell)
        tell(file.size_bytes)
        done_bytes += file.size_bytes
        if found is None or not found.documents:
            pieces.cut(before)
            continue
        survey.files.append(file)
        survey.contents.append(_short(found.content))
        survey.content.update(b"%d" % file.held_out + found.content.digest())
        survey.documents += found.documents
        survey.text_bytes += found.text_bytes
    if not survey.files or any(file.held_out for file in survey.files):
        return
    # A window may take several bytes a token; the exact check comes when the tokens are there.
    text_bytes = survey.text_bytes
    wanted_bytes = min(max(text_bytes * held_out_fraction, 2 * (context + 1)), text_bytes / 2)
    survey.threshold = threshold_of(pieces, wanted_bytes)


def _read_file_first(
    file: Candidate,
    survey: Survey,
    pieces: Pieces,
    skipped: Skipped,
    tell: Callable[[int], None],
) -> _FoundInFile | None:
    """Read one file. Returns None, and counts the file, if it cannot be used. Raises `UserError` if
    the user asked for this file."""
    found = _FoundInFile()
    try:
        for number, piece in enumerate(survey.pieces_of(file, skipped), 1):
            _add(found.content, piece)
            pieces.add(piece)
            found.text_bytes += len(piece.text)
            found.documents += piece.ends_document
            if number % PROGRESS_EVERY_PIECES == 0:
                tell(piece.read_bytes)
    except NotText:
        skipped.not_text += 1
        return None
    except NoTextField as error:
        if file.named:
            raise UserError(str(error), _way_to_read(error.fields)) from error
        skipped.without_field += 1
        return None
    except OSError as error:
        if file.named:
            raise UserError(
                f"cannot read {file.path}: {error.strerror}", "check its permissions"
            ) from error
        skipped.note_unreadable(error)
        return None
    return found


def _way_to_read(fields: list[str]) -> str:
    """How to read rows that have no text where it was looked for."""
    if {"messages", "conversations"} & set(fields):
        return "these are conversations: write them as a model of yours does, with --chat DIR"
    if {"prompt", "completion"} <= set(fields):
        return "these are questions and answers: only answers count with --conversations"
    return f"name the field that holds it: --field {fields[0] if fields else 'NAME'}"


def threshold_of(pieces: Pieces, wanted_bytes: float) -> int:
    """The key up to which pieces must be held out to make `wanted_bytes` of them. It is found digit
    by digit, since sorting all keys takes several times the memory that they do."""
    found, below_bytes = 0, 0
    for shift in range(64 - _DIGIT_BITS, -1, -_DIGIT_BITS):
        of_digit = np.zeros(1 << _DIGIT_BITS)  # sums of whole numbers, far below 2**53
        for keys, sizes_bytes in pieces.parts():
            if shift + _DIGIT_BITS < 64:
                chosen = keys >> np.uint64(shift + _DIGIT_BITS) == np.uint64(found)
                keys, sizes_bytes = keys[chosen], sizes_bytes[chosen]
            digits = keys >> np.uint64(shift) & np.uint64((1 << _DIGIT_BITS) - 1)
            of_digit += np.bincount(digits.astype(np.int64), sizes_bytes, 1 << _DIGIT_BITS)
        up_to = below_bytes + np.cumsum(of_digit)
        digit = int(np.searchsorted(up_to, min(wanted_bytes, up_to[-1])))
        below_bytes = up_to[digit] - of_digit[digit]
        found = found << _DIGIT_BITS | digit
    return found
