"""Locks of this machine, beyond one home.

One daemon may use one accelerator: two would take each other's memory and spoil what was measured.
One daemon may use one identity: two, as where a home is copied, would speak as one peer and undo
each other's work.
"""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UserError

HOLDER_LIMIT_BYTES = 4096


def temporary_folder() -> Path:
    """This machine's folder for temporary files. Raises `UserError` where nothing can be written in
    any."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise UserError(
            f"no folder for temporary files: {error.strerror}",
            "free space on their disk, or name a folder with the environment variable TMPDIR",
        ) from error


@contextlib.contextmanager
def only_daemon_on(device: str | None) -> Iterator[None]:
    """Hold the lock of a device, whichever user and home has it. None is a device that may be
    shared.

    Raises `UserError` with exit code 3 if another daemon holds it.
    """
    if device is None:
        yield
        return
    path = temporary_folder() / f"p2p-dtfm-{device}.lock"
    with os.fdopen(_open(path), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"a daemon is already running on the device {device}",
                ("choose another one: --device cuda:1", "or the processor: --device cpu"),
                exit_code=3,
            ) from None
        yield


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:  # another user's: it may be opened but not made
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)


def hold_identity(identity: Path, home: Path, folder: Path | None = None) -> IO[str] | None:
    """The lock of an identity, held until it is closed. None where nobody can tell, as where the
    lock is another user's. Raises `UserError` with exit code 3 if a daemon of another home has
    it."""
    name = digest_bytes(identity.read_bytes())[:16]
    folder = folder or temporary_folder()
    path = folder / f"p2p-dtfm-identity-{name}.lock"
    try:
        lock = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+")
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = lock.read(HOLDER_LIMIT_BYTES).strip() or "an unknown one"
        lock.close()
        raise UserError(
            f"another daemon speaks as this very peer ({holder}): one of the two homes is a copy",
            (
                f"to be another peer here: remove {identity}, and start again",
                "to move the daemon here: end the other one first",
            ),
            exit_code=3,
        ) from None
    except OSError:  # a disk that keeps no locks
        lock.close()
        return None
    with contextlib.suppress(OSError):  # as on a full disk: it does not say whose it is
        lock.truncate(0)
        told = f"process {os.getpid()}, in {home}"
        os.write(lock.fileno(), told.encode(errors="backslashreplace"))
    return lock
