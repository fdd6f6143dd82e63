"""One daemon on one accelerator: two would take each other's memory and spoil what was measured."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError


@contextlib.contextmanager
def only_daemon_on(device: str | None) -> Iterator[None]:
    """Hold the lock of a device, of whichever user and home; None is one that may be shared.

    Raises `UserError` with exit code 3 if another daemon holds it.
    """
    if device is None:
        yield
        return
    path = Path(tempfile.gettempdir()) / f"p2p-dtfm-{device}.lock"
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
    except PermissionError:  # another user's, where such files may be opened but not made
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
