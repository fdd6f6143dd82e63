"""The transcript in a home: written as steps commit, read by anybody."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.recovery.recovery_evidence import Restart
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.core.transcript.entries import (
    ENTRY_LIMIT_BYTES,
    Began,
    Committed,
    Entry,
    TookOver,
    entry_of,
    format_of,
    line_of,
)
from p2p_dtfm.ports import disk

FILE_NAME = "transcript.txt"
MIB = 1 << 20
LINE_READ_BYTES = 8 * MIB
OWED_LIMIT_BYTES = 16 * MIB
"""How much is kept for later of the beginning and of views, where a full disk does not take them. A
transcript that goes on without them is true to nobody."""

log = logging.getLogger("p2p_dtfm")


class Transcript:
    """Appends to one file, until it is as large as it may be: what is written stays, and later
    steps are not in it."""

    def __init__(self, path: Path, spec: RunSpec, limit_bytes: int) -> None:
        """With `limit_bytes` 0 none is written."""
        self._path = path
        self._limit_bytes = limit_bytes
        self._is_full = limit_bytes == 0
        self._is_torn = False
        """Whether the last line was not written whole, and could not be taken away."""
        self._has_warned = False
        """Whether a failure was said. For each step it would be too often: the full disk may hold
        the log itself."""
        self._view: View | None = None
        self._next_step = 0
        """The step after those of the view in force that are here."""
        _put_older_aside(path, format_of(spec))
        size_bytes = path.stat().st_size if path.exists() else 0
        self._size_bytes = size_bytes
        self._owed = ""
        """What must be written before anything else."""
        if not size_bytes:
            self._write(Began(format_of(spec), spec.canonical_bytes()))
        elif _ends_within_a_line(path):
            self._is_torn = not self._append("\n")

    @property
    def path(self) -> Path:
        return self._path

    @property
    def size_bytes(self) -> int:
        """What is written by now; it ends with a whole line."""
        return self._size_bytes

    def piece(self, from_byte: int, most_bytes: int) -> bytes:
        """A piece for others: of whole lines, as far as they are written; empty where none is
        kept."""
        size_bytes = min(most_bytes, self.told_bytes - from_byte)
        if from_byte < 0 or size_bytes <= 0:
            return b""
        try:
            with self._path.open("rb") as file:
                file.seek(from_byte)
                return file.read(size_bytes)
        except OSError as error:
            log.warning("the transcript cannot be read: %s", error)
            return b""

    @property
    def told_bytes(self) -> int:
        """How much of it others may have."""
        return self._size_bytes if self._limit_bytes else 0

    def took_over(self, view: View, step: int) -> None:
        """From `step` on the view is in force."""
        if view.certificate is not None:
            self._view, self._next_step = view, step
            self._write(TookOver(view.snapshot, view.plan, view.certificate, step))

    def committed(self, step: int, signed: tuple[Signed, ...]) -> None:
        """Add every stage-holder's Prepared of a step of the view in force; nothing where this peer
        has not heard them all."""
        if signed and self._view is not None:
            self._next_step = step + 1
            self._write(Committed(signed))

    def rolled_forward(self, restart: Restart, step: int) -> None:
        """Add the last step of the view in force, where others had committed it and this peer had
        not. Call it before the next view takes over, or the step would be missing here for good."""
        is_ours = self._view is not None and self._view.id == restart.rolled_view
        if is_ours and step >= self._next_step:
            self.committed(step, restart.prepared)

    def _write(self, entry: Entry) -> None:
        """A full disk costs steps, not the daemon. What later steps rest on is not lost either, if
        there is room again in time."""
        if self._is_full:
            return
        line = line_of(entry) + "\n"
        if self._append(self._owed + line):
            self._owed = ""
        elif not isinstance(entry, Committed):
            self._owed += line
            if len(self._owed) > OWED_LIMIT_BYTES:
                self._is_full, self._owed = True, ""
                log.warning("the transcript ends here: its disk has been full for too long")

    def _append(self, text: str) -> bool:
        """Add text to the file. Returns whether it is there now."""
        if self._is_torn:
            text = "\n" + text
        if self._size_bytes + len(text) > self._limit_bytes:
            self._is_full = True
            if self._limit_bytes:
                log.info(
                    "the transcript of this run is full: its %d MiB are kept, and nothing is added",
                    self._limit_bytes // MIB,
                )
            return False
        try:
            disk.append(self._path, text)
        except OSError as error:
            level = logging.DEBUG if self._has_warned else logging.WARNING
            log.log(level, "a line of the transcript is not written: %s", error)
            self._has_warned = True
            with contextlib.suppress(OSError):
                size_bytes = self._path.stat().st_size
                self._is_torn = self._is_torn or size_bytes > self._size_bytes
                self._size_bytes = size_bytes
            return False
        self._size_bytes += len(text)
        self._is_torn = self._has_warned = False
        return True


def transcript_in(directory: Path, spec: RunSpec, limit_mib: int) -> Transcript:
    """The transcript of the run whose directory it is."""
    return Transcript(directory / FILE_NAME, spec, limit_mib * MIB)


def _put_older_aside(path: Path, due_format: int) -> None:
    """Put aside a transcript of a version whose lines are read no more, or one whose beginning a
    power cut took: what would be added could not be read either."""
    try:
        with path.open("rb") as file:
            first = file.readline(LINE_READ_BYTES)
        if first and not _begins(first, due_format):
            path.replace(path.with_suffix(".before"))
    except FileNotFoundError:
        pass
    except OSError as error:
        log.debug("how the transcript begins cannot be read: %s", error)


def _begins(line: bytes, due_format: int) -> bool:
    try:
        began = entry_of(line)
    except PeerFault:
        return False
    return isinstance(began, Began) and began.format >= due_format


def _ends_within_a_line(path: Path) -> bool:
    """Whether the file ends as a process leaves it that was killed while it wrote."""
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"


class TranscriptLines:
    """`entries` gives those of a file; afterwards `damaged` counts its lines that could not be
    read."""

    def __init__(self, path: Path, from_byte: int = 0) -> None:
        """`from_byte`: where a line begins."""
        self._path = path
        self._from_byte = from_byte
        self.damaged = 0

    def entries(self) -> Iterator[Entry]:
        """Raises `UserError`."""
        limit = 2 * ENTRY_LIMIT_BYTES
        try:
            with self._path.open("rb") as file:
                file.seek(self._from_byte)
                while line := file.readline(limit):
                    if line.strip():
                        try:
                            entry = entry_of(line)
                        except PeerFault:
                            self.damaged += 1
                            continue
                        yield entry
        except OSError as error:
            raise UserError(
                f"cannot read the transcript {self._path}: {error.strerror}",
                "name a file that a daemon has written: runs/*/transcript.txt in its home",
            ) from error
