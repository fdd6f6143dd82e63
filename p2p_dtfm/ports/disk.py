"""The disk as a daemon sees it, where it writes what outlives it.

Reading, directories, removing and locks are the operating system's, in every world. Only writing
may be slow or refused, and only what was written is lost or torn when a machine stops. The disk is
part of the context, like the clock (`p2p_dtfm.ports.now`).
"""

import contextlib
import errno
import os
import shutil
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO, Protocol

PARTIAL = ".partial"
ALL_MAY = 0o666
"""All may read and write, as far as the process's mask lets them."""
ONLY_OWNER = 0o600
_PIECE_BYTES = 1 << 20

Payload = bytes | bytearray | memoryview


class Disk(Protocol):
    """What the program asks of a disk. All methods raise `OSError`."""

    def write_whole(self, path: Path, payload: Payload, mode: int) -> None:
        """Write a whole file. After any crash, `path` has either what was there before or all of
        `payload`."""

    def append(self, path: Path, text: str) -> None:
        """Add to a file. Whether its end outlives a crash is unknown."""

    def write(self, file: BinaryIO, payload: Payload) -> None:
        """Write a piece of a file that has no name yet."""

    def name(self, temporary: Path, path: Path) -> None:
        """Give a file, whose pieces were written and forced to the disk, its name."""

    def sync_directory(self, directory: Path) -> None:
        """Force a directory to the disk: only then do the names in it last. Nothing happens where
        its filesystem cannot do that, as some that another machine shares."""

    def free_bytes(self, directory: Path) -> int:
        """Free bytes where this directory lies, by what the disk knows; a quota may leave less."""


class MachineDisk:
    """This machine's disk."""

    def write_whole(self, path: Path, payload: Payload, mode: int) -> None:
        temporary = path.with_name(path.name + PARTIAL)
        try:
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with open(descriptor, "wb") as file:
                if mode != ALL_MAY:
                    os.fchmod(descriptor, mode)  # what another program left may be open to others
                for start in range(0, len(payload), _PIECE_BYTES):
                    file.write(memoryview(payload)[start : start + _PIECE_BYTES])
                file.flush()
                os.fsync(descriptor)
            temporary.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise

    def append(self, path: Path, text: str) -> None:
        whole_bytes = None
        try:
            with path.open("a") as file:
                whole_bytes = file.tell()
                file.write(text)
        except OSError:
            if whole_bytes is not None:
                with contextlib.suppress(OSError):
                    os.truncate(path, whole_bytes)
            raise

    def write(self, file: BinaryIO, payload: Payload) -> None:
        file.write(payload)

    def name(self, temporary: Path, path: Path) -> None:
        os.replace(temporary, path)

    def sync_directory(self, directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # that filesystem forces files alone
                raise
        finally:
            os.close(descriptor)

    def free_bytes(self, directory: Path) -> int:
        return shutil.disk_usage(directory).free


_DISK: ContextVar[Disk] = ContextVar("disk", default=MachineDisk())  # noqa: B039


def live_by(disk: Disk) -> None:
    """Use this disk from here on in this task, and in all tasks that it begins."""
    _DISK.set(disk)


def write_whole(path: Path, payload: Payload, mode: int = ALL_MAY) -> None:
    """Write a whole file. Raises `OSError`; then what was there before is still there."""
    _DISK.get().write_whole(path, payload, mode)


def append(path: Path, text: str) -> None:
    """Add to a file. Raises `OSError`; then no part of `text` is left, to which the next text would
    be glued."""
    _DISK.get().append(path, text)


def write(file: BinaryIO, payload: Payload) -> None:
    """Write a piece of a file that has no name yet. Raises `OSError`."""
    _DISK.get().write(file, payload)


def name(temporary: Path, path: Path) -> None:
    """Give a file that was forced to the disk its name. Raises `OSError`."""
    _DISK.get().name(temporary, path)


def sync_directory(directory: Path) -> None:
    """Force a directory to the disk. Raises `OSError`."""
    _DISK.get().sync_directory(directory)


def free_bytes(directory: Path) -> int:
    """Free bytes where this directory lies. Raises `OSError`."""
    return _DISK.get().free_bytes(directory)
