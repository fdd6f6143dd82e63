"""A new directory or file that appears whole or not at all, while nobody's own files are touched.

It is made in a hidden directory beside its place. If its place is an empty directory, it is made
inside; so this may be the working directory or the root of a disk.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports import disk

_MARK = ".p2p-dtfm-partial-"
"""The beginning of the hidden name; the number of the writing process follows it."""


def require_new(out: Path) -> None:
    """Raises `UserError` for anything that is there already and is no empty directory."""
    if out.is_dir() and any(not each.name.startswith(_MARK) for each in out.iterdir()):
        raise UserError(f"{out} exists and is not empty", "choose a new place for --out")
    if out.exists() and not out.is_dir():
        raise UserError(f"{out} exists already", "choose a new place for --out")


@contextmanager
def made_whole(out: Path) -> Iterator[Path]:
    """Gives the path at which to make the directory or file. In the end, what was made there takes
    its place.

    Raises `UserError` where nothing can be written.
    """
    place = out.resolve()
    parent = place if place.is_dir() else place.parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
        _clear(parent)
        beside = Path(tempfile.mkdtemp(prefix=f"{_MARK}{os.getpid()}-", dir=parent))
        held = _lock(beside)
        try:
            made = beside / (place.name or "made")
            yield made
            _force_to_disk(made)
            if place.is_dir() and made.is_dir():
                for each in made.iterdir():
                    os.replace(each, place / each.name)
            else:
                os.replace(made, place)
            disk.sync_directory(parent)
        finally:
            shutil.rmtree(beside, ignore_errors=True)
            os.close(held)
    except OSError as error:
        raise UserError(
            f"cannot write {out}: {error.strerror or error}",
            "choose a directory that you may write to for --out, with enough space",
        ) from error


def _force_to_disk(made: Path) -> None:
    """A power cut may else leave the name of what was made, and not its content."""
    for path in (made, *made.rglob("*")):
        if path.is_dir():
            disk.sync_directory(path)
            continue
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def seen_beside(path: Path) -> Path:
    """The final directory of something that is still being made."""
    hidden = [parent for parent in path.parents if parent.name.startswith(_MARK)]
    return hidden[-1].parent if hidden else path.parent


def _clear(parent: Path) -> None:
    """Remove what killed processes have left. A process in another container has a number that
    means nothing here, so whoever is at work holds a lock, too."""
    for left in parent.glob(f"{_MARK}*"):
        process = left.name.removeprefix(_MARK).partition("-")[0]
        with contextlib.suppress(ValueError, OverflowError, OSError):
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                held = _lock(left)
                shutil.rmtree(left, ignore_errors=True)
                os.close(held)


def _lock(directory: Path) -> int:
    """A descriptor that holds the directory's lock. Raises `BlockingIOError` if another process
    holds it, and other OSErrors."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # a filesystem without locks
    return descriptor
