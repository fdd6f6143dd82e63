"""The disk of a virtual machine: it may be slow or full, and forget what it has promised.

Files are real ones, and what is written is there at once. Until a change lasts, the disk notes what
was there before. So a kill can undo what was not written yet. A power cut can undo what was not
yet forced to the disk, and on a disk that lies also what was said to be.
"""

import contextlib
import errno
import os
import random
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from p2p_dtfm.core.units import SECOND_NS
from p2p_dtfm.ports.disk import PARTIAL, Payload
from p2p_dtfm.testbed.virtual.process import PROCESS, Turns

WRITE_NS = 100_000
BYTES_PER_S = 500_000_000
SLOW_WRITE_NS = 150_000_000
SLOW_BYTES_PER_S = 400_000
ROOM_BYTES = 1 << 50
"""Free, unless the disk is full."""
LASTS_AFTER_NS = 5 * SECOND_NS
"""A change lasts after so long without any call: the operating system has written it down."""
HISTORY = "events.jsonl"


@dataclass
class _Change:
    """A change of one file. Changes are kept in the order in which they were made."""

    path: Path
    before: bytes | None
    """The file's content before, where the change replaces it."""
    kept_bytes: int
    """How much of the file was there before, where the change appends to it."""
    done_ns: int
    """When the daemon hears that the change is done."""
    is_whole: bool
    """The change puts a new content under the old name. It appends nothing, and its bytes were
    forced to the disk."""

    def undo(self) -> None:
        with contextlib.suppress(OSError):  # its directory may be gone meanwhile
            if self.before is not None:
                self.path.write_bytes(self.before)
            elif self.kept_bytes:
                os.truncate(self.path, min(self.kept_bytes, self.path.stat().st_size))
            else:
                self.path.unlink(missing_ok=True)

    def tear(self) -> None:
        """Leaves only half of what was written."""
        with contextlib.suppress(OSError):
            content = self.path.read_bytes()
            torn = (len(content) - self.kept_bytes) // 2
            self.path.write_bytes(content[: self.kept_bytes + torn])


class VirtualDisk:
    """The `p2p_dtfm.ports.disk.Disk` of one machine, for all processes that write there."""

    def __init__(self, loop: Turns) -> None:
        self.is_full = False
        self.is_slow = False
        self.lies = False
        """The disk says that changes are written down that a power cut still takes."""
        self.told: list[tuple[float, str]] = []
        """Each line of the history that a daemon asked to write, and when, for a judge."""
        self.refused = 0
        self._loop = loop
        self._changes: list[_Change] = []

    # what daemons ask ----------------------------------------------------------------------------

    def write_whole(self, path: Path, payload: Payload, mode: int) -> None:
        self._require_room(path)
        self._take(len(payload))
        before = _content(path)
        path.touch(mode)
        path.write_bytes(payload)
        self._note(_Change(path, before, 0, self._now_ns(), is_whole=True))

    def append(self, path: Path, text: str) -> None:
        if path.name == HISTORY:
            self.told += [(self._now_ns() / 1e9, line) for line in text.splitlines() if line]
        self._require_room(path)
        with path.open("a") as file:
            kept_bytes = file.tell()
            file.write(text)
        self._note(_Change(path, None, kept_bytes, self._now_ns(), is_whole=False))

    def write(self, file: BinaryIO, payload: Payload) -> None:
        self._require_room(None)
        self._take(len(payload))
        file.write(payload)

    def name(self, temporary: Path, path: Path) -> None:
        before = _content(path)
        temporary.replace(path)
        self._note(_Change(path, before, 0, self._now_ns(), is_whole=True))

    def sync_directory(self, directory: Path) -> None:
        self._take(0)
        if not self.lies:
            self._changes = [
                change
                for change in self._changes
                if change.path.parent != directory or not change.is_whole
            ]

    def free_bytes(self, directory: Path) -> int:
        return 0 if self.is_full else ROOM_BYTES

    # what the world does to it --------------------------------------------------------------------

    def process_was_killed(self) -> None:
        """Undoes what was being written, and leaves half of each whole file under its partial
        name."""
        under_way = [change for change in self._changes if change.done_ns > self._loop.now_ns]
        for change in reversed(under_way):
            content = _content(change.path) or b""
            change.undo()
            if change.is_whole:
                with contextlib.suppress(OSError):
                    partial = change.path.with_name(change.path.name + PARTIAL)
                    partial.write_bytes(content[: len(content) // 2])
        self._changes = [change for change in self._changes if change not in under_way]

    def power_was_cut(self, draws: random.Random) -> None:
        """Undoes some of the newest changes, and perhaps half of the last that stays."""
        self._forget()
        changes, self._changes = self._changes, []
        stays = draws.randint(0, len(changes))
        for change in reversed(changes[stays:]):
            change.undo()
        if stays and (self.lies or not changes[stays - 1].is_whole):
            changes[stays - 1].tear()

    def note_replaced(self) -> None:
        """The files have been replaced by others: what was noted of them no longer holds."""
        self._changes.clear()

    # ---------------------------------------------------------------------------------------------

    def _now_ns(self) -> int:
        return self._loop.now_ns + self._loop.job_ns

    def _require_room(self, path: Path | None) -> None:
        if self.is_full:
            self.refused += 1
            raise OSError(errno.ENOSPC, "No space left on device", path and str(path))

    def _take(self, size_bytes: int) -> None:
        """Takes the time of a write. Within a job only the job takes longer; outside one, the
        writer's event loop does nothing else meanwhile."""
        if self.is_slow:
            took_ns = SLOW_WRITE_NS + size_bytes * SECOND_NS // SLOW_BYTES_PER_S
        else:
            took_ns = WRITE_NS + size_bytes * SECOND_NS // BYTES_PER_S
        if self._loop.in_job:
            self._loop.job_ns += took_ns
        elif (process := PROCESS.get()) is not None:
            process.stall(took_ns)

    def _note(self, change: _Change) -> None:
        self._forget()
        self._changes.append(change)

    def _forget(self) -> None:
        """Forgets changes that last by now."""
        oldest_ns = self._loop.now_ns - LASTS_AFTER_NS
        self._changes = [change for change in self._changes if change.done_ns > oldest_ns]


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
