"""Reading all documents once, to say of each whether it is to be learnt.

A document is judged first by whether its very text came before, then by the rules of `--keep`, then
by whether much of it came before. It is counted under the first of these that speaks against it.
"""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.train.data.atomic_file import fix_of
from p2p_dtfm.train.data.documents import Piece, read_documents
from p2p_dtfm.train.data.first_reading import Progress, Survey, changed
from p2p_dtfm.train.data.formats.compressed import open_lines
from p2p_dtfm.train.data.manifest import LeftOut, Selection
from p2p_dtfm.train.data.quality import signal_files
from p2p_dtfm.train.data.quality.expression import Rules, parse_rules
from p2p_dtfm.train.data.quality.near_duplicates import TextSignatures
from p2p_dtfm.train.data.quality.signals import COMPUTED, TEXT_LIMIT_BYTES, Text, compute
from p2p_dtfm.train.data.quality.work_file import WorkFile
from p2p_dtfm.train.data.text_files import Candidate, NoTextField, NotText, Skipped

Duplicates = Literal["keep", "exact", "near"]
Stamp = tuple[int, int]
"""Size of a file, and when it was last written to: with another text it has another stamp."""

_KEPT, _EXACT, _NEAR, _FIRST_RULE = range(4)
_UNJUDGED = -1
_FORMAT = 1


@dataclass(frozen=True)
class Wish:
    """Which documents are wanted. Raises `UserError` on a similarity that means nothing."""

    keep: str = ""
    """An expression; empty: all documents are kept."""
    duplicates: Duplicates = "keep"
    similarity: float = 0.8
    """The similarity from which on two texts count as near duplicates."""

    def __post_init__(self) -> None:
        if not 0.1 <= self.similarity <= 0.99:
            raise UserError(
                f"a similarity of {self.similarity} cannot be looked for",
                "choose between 0.1 and 0.99; 0.8 is usual",
            )

    def __bool__(self) -> bool:
        """Whether anything is asked for."""
        return bool(self.keep.strip()) or self.duplicates != "keep"


@dataclass
class _Document:
    """What is known of a document when all of its pieces have gone by."""

    line: int = 0
    hasher: "hashlib.blake2b" = field(default_factory=lambda: hashlib.blake2b(digest_size=16))
    beginning: bytearray = field(default_factory=bytearray)
    size_bytes: int = 0

    def add(self, piece: Piece) -> None:
        self.line = piece.line
        self.hasher.update(piece.text)
        self.size_bytes += len(piece.text)
        if len(self.beginning) < TEXT_LIMIT_BYTES:
            self.beginning += piece.text


class Choosing:
    """Call `read_all` first, then `kept` as often as needed."""

    def __init__(
        self,
        wish: Wish,
        files: list[Candidate],
        stamps: list[Stamp],
        text_field: str,
        rules: Rules,
        work: WorkFile,
    ) -> None:
        """`stamps`: those of the files when `work` was begun."""
        self._wish, self._files, self._field, self._work = wish, files, text_field, work
        self._places = {file.path: number for number, file in enumerate(files)}
        self._stamps = stamps
        self._rules = rules
        near = wish.duplicates == "near"
        self._signatures = TextSignatures(wish.similarity) if near else None

    def read_all(self, piece_bytes: int, progress: Progress) -> None:
        """Judge all documents, from where a process that was ended had got to. Raises
        `UserError`."""
        total_bytes = sum(file.size_bytes for file in self._files)
        done_bytes = 0
        for number, file in enumerate(self._files):
            if number >= self._work.files_done:
                for piece in self._read(number, file, piece_bytes):
                    progress(
                        min(done_bytes + piece.read_bytes, total_bytes), total_bytes, "choosing"
                    )
            done_bytes += file.size_bytes
            progress(done_bytes, total_bytes, "choosing")
        self._work.keep()
        selection = self.selection()
        if selection.documents and selection.documents == sum(
            each.documents for each in selection.left_out
        ):
            raise UserError(
                f"no document is left: {selection.describe()}",
                "ask for less with --keep: each rule is counted above",
            )

    def kept(self, file: Candidate, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """The pieces of documents that are to be learnt. Raises `UserError` if the file is not the
        one whose documents were judged, and OSError if nobody could read and judge them."""
        number, path = self._places[file.path], str(file.path)
        codes, stamp = self._work.codes(number), self._stamps[number]
        code: int | None = None
        for piece in pieces:
            if code is None:
                code = next(codes, _UNJUDGED)
            if code in (_KEPT, _UNJUDGED):
                yield piece
            if piece.ends_document and code == _UNJUDGED and _stamp(file.path) == stamp:
                raise OSError(errno.EIO, "it could not be read when documents were judged", path)
            if piece.ends_document:
                code = None
        if _stamp(file.path) != stamp:
            raise changed(file, "its documents were judged before")

    def selection(self) -> Selection:
        """How many documents were left out for each reason."""
        counts = self._work.count(_FIRST_RULE + len(self._rules.rules))
        reasons = []
        if self._wish.duplicates != "keep":
            reasons.append(LeftOut("duplicate", counts[_EXACT]))
        for number, rule in enumerate(self._rules.rules):
            reasons.append(LeftOut(rule.text, counts[_FIRST_RULE + number]))
        if self._signatures is not None:
            name = f"near duplicate (similarity >= {self._wish.similarity:g})"
            reasons.append(LeftOut(name, counts[_NEAR]))
        return Selection(sum(counts), tuple(reasons))

    def _read(self, number: int, file: Candidate, piece_bytes: int) -> Iterator[Piece]:
        """Judges a file's documents; now and then yields the last piece that was read."""
        judged, place = self._work.judged(number), 0
        document = _Document()
        with ExitStack() as stack:
            signals = _signals_beside(file, stack) if self._rules.names else None
            try:
                for piece in read_documents(file, self._field, piece_bytes, Skipped()):
                    if place >= judged:
                        document.add(piece)
                    if not piece.ends_document:
                        continue
                    place += 1
                    if place <= judged:
                        continue
                    self._work.note(self._verdict(document, signals), document.size_bytes)
                    document = _Document()
                    if self._work.is_due:
                        self._work.put_down(number)
                        self._work.keep()
                        yield piece
            except (NotText, NoTextField):
                self._work.drop(number)  # the next reading says what is wrong with it
            except OSError as error:
                if file.named or place or judged:  # others may be duplicates of what it gave
                    raise UserError(
                        f"cannot read {file.path}: {error.strerror or error}",
                        "see that its disk is sound, and its permissions; or leave it out",
                    ) from error
        self._work.put_down(number, is_done=True)
        if self._work.is_due:
            self._work.keep()

    def _verdict(self, document: _Document, signals: signal_files.SignalFile | None) -> int:
        if self._wish.duplicates != "keep" and not self._work.is_new(document.hasher.digest()):
            return _EXACT
        text = Text(document.beginning.decode("utf-8", "ignore"))
        if self._rules.rules:
            given = {} if signals is None else signals.of_line(document.line)

            def lookup(name: str) -> float | None:
                if name in given or name not in COMPUTED:
                    return given.get(name)
                return compute(name, text)

            failed = self._rules.first_failed(lookup)
            if failed is not None:
                return _FIRST_RULE + failed
        if self._signatures is not None:
            signature = self._signatures.of(text.words)
            bands = self._signatures.bands(signature)
            for other in self._work.candidates(bands):
                if self._signatures.are_alike(signature, other):
                    return _NEAR
            self._work.add_signature(signature, bands)
        return _KEPT


@contextmanager
def chosen(
    wish: Wish, files: list[Candidate], survey: Survey, out: Path, progress: Progress
) -> Iterator[None]:
    """Within it, `survey` gives only the documents that are wanted.

    The verdicts are thrown away when all within has gone well; otherwise they are kept for the next
    time. Raises `UserError`.
    """
    if not wish:
        yield
        return
    try:
        rules = _rules_for(wish, files)
        stamps = [_stamp(file.path) for file in files]
        digest = _wish_digest(wish, files, stamps, survey.text_field)
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}", "check its permissions"
        ) from error
    try:
        work = WorkFile(out, digest)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}", fix_of(error, out)) from error
    try:
        choosing = Choosing(wish, files, stamps, survey.text_field, rules, work)
        with work.explained():
            choosing.read_all(survey.piece_bytes, progress)
        survey.verdicts, survey.selection = choosing, choosing.selection()
        yield
    except BaseException:
        work.close()
        raise
    work.remove()


def _stamp(path: Path) -> Stamp:
    """Raises OSError."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def _wish_digest(wish: Wish, files: list[Candidate], stamps: list[Stamp], text_field: str) -> str:
    """A digest of what is asked of which files, as these are now. Raises OSError."""
    stats = []
    for file, stamp in zip(files, stamps, strict=True):
        beside = signal_files.signal_file_of(file.path)
        stats.append((os.fsencode(file.path), *stamp, _stamp(beside) if beside else None))
    wanted = (_FORMAT, wish.keep, wish.duplicates, wish.similarity, text_field, stats)
    return digest_bytes(msgspec.json.encode(wanted))


def _rules_for(wish: Wish, files: list[Candidate]) -> Rules:
    """Raises `UserError` if a rule asks for a signal that neither the text nor a file has."""
    if not wish.keep.strip():
        return Rules((), ())
    beside = {file.path: signal_files.signal_file_of(file.path) for file in files}
    given: set[str] = set()
    for path in beside.values():
        if path is not None:
            given |= signal_files.names_in(path)
    rules = parse_rules(wish.keep, sorted({*COMPUTED, *given}))
    for name in rules.names:
        for path, signals in beside.items():
            if name not in COMPUTED and signals is None:
                raise UserError(
                    f"--keep asks for {name}, which only a signals file can tell, and {path} has "
                    "none",
                    (
                        f"put it beside: {path.name.split('.')[0]}.signals.json.gz",
                        "ask for signals of the text alone",
                    ),
                )
    return rules


def _signals_beside(file: Candidate, stack: ExitStack) -> signal_files.SignalFile | None:
    path = signal_files.signal_file_of(file.path)
    if path is None:
        return None
    lines = stack.enter_context(open_lines(path, signal_files.LINE_LIMIT_BYTES))
    return signal_files.SignalFile(path, lines)
