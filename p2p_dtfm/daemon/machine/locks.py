"""Locks of this machine, beyond one home.

One daemon may use one accelerator: two would take each other's memory and spoil what was measured.
One daemon may use one identity: two, as where a home is copied, would speak as one peer and undo
each other's work.
"""

import contextlib
import fcntl
import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.ports import now

HOLDER_LIMIT_BYTES = 4096
UNKNOWN = "an unknown one"
TRIES, TRY_AGAIN_S = 3, 0.02
"""Who looks whether a lock is a dead daemon's holds it for a moment."""
STALE_AFTER_S = 60.0
LOOKED_AT_LIMIT = 4096
_IDENTITY = "p2p-dtfm-identity-"


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
    """The lock of an identity, held until `let_go_of_identity` or the end of the process. None
    where nobody can tell, as where the lock is another user's. Raises `UserError` with exit code 3
    if a daemon of another home has it."""
    path = identity_lock_of(identity, folder)
    try:
        lock = _locked(path)
    except BlockingIOError:
        raise UserError(
            f"another daemon speaks as this very peer ({_holder(path)}): one of the two homes is a "
            "copy",
            (
                f"to be another peer here: remove {identity}, and start again",
                "to move the daemon here: end the other one first",
            ),
            exit_code=3,
        ) from None
    except OSError:  # another user's, or on a disk that keeps no locks
        return None
    with contextlib.suppress(OSError):  # as on a full disk: it does not say whose it is
        lock.truncate(0)
        told = f"process {os.getpid()}, in {home}"
        os.write(lock.fileno(), told.encode(errors="backslashreplace"))
    _remove_stale_locks(path.parent)
    return lock


def identity_lock_of(identity: Path, folder: Path | None = None) -> Path:
    """Where the lock of an identity lies while a daemon has it."""
    name = digest_bytes(identity.read_bytes())[:16]
    return (folder or temporary_folder()) / f"{_IDENTITY}{name}.lock"


def let_go_of_identity(lock: IO[str]) -> None:
    """Free the lock, and remove its file. Each peer has an identity of its own, so what stays would
    pile up."""
    with contextlib.suppress(OSError):
        if _is_named(lock):  # else it went with other old files, and the name may be another's
            os.unlink(lock.name)
    lock.close()


def _locked(path: Path, tries: int = TRIES) -> IO[str]:
    """The file, locked. Raises `BlockingIOError` where it stays another one's, and `OSError`."""
    while True:
        lock = open(path, "r+", opener=_opened_or_made)  # noqa: SIM115 - it stays open
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(lock):  # else its holder has removed it, and the next one makes another
                return lock
            lock.close()
        except OSError as error:
            lock.close()
            tries -= 1
            if not isinstance(error, BlockingIOError) or not tries:
                raise
            threading.Event().wait(TRY_AGAIN_S)


def _opened_or_made(name: str, flags: int) -> int:
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)


def _is_named(lock: IO[str]) -> bool:
    """Whether the file still has the name by which it was opened."""
    try:
        return os.path.samestat(os.stat(lock.name), os.fstat(lock.fileno()))
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    with contextlib.suppress(OSError), path.open(errors="replace") as file:
        return file.read(HOLDER_LIMIT_BYTES).strip() or UNKNOWN
    return UNKNOWN


def _remove_stale_locks(folder: Path) -> None:
    """Remove locks of identities that killed processes of ours have left, which nobody holds."""
    found: list[Path] = []
    with contextlib.suppress(OSError):  # a folder that is not to be read
        found += itertools.islice(folder.glob(f"{_IDENTITY}*.lock"), LOOKED_AT_LIMIT)
    for path in found:
        with contextlib.suppress(OSError):  # one that is held, or that another daemon removes
            status = path.lstat()
            if status.st_uid == os.getuid() and now.wall_s() - status.st_mtime > STALE_AFTER_S:
                let_go_of_identity(_locked(path, tries=1))
