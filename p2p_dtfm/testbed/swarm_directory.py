"""Where a local swarm lives, and whether it is really gone."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from p2p_dtfm.core.protocol.errors import UserError

LEFT_AFTER_S = 3.0
POLL_S = 0.1


@contextmanager
def kept_directory(keep: Path | None) -> Iterator[Path]:
    """A new directory, which stays if the user named it. Raises `UserError`."""
    if keep is None:
        path = Path(tempfile.mkdtemp(prefix="p2p-dtfm-"))
        try:
            yield path
        finally:
            shutil.rmtree(path, ignore_errors=True)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        is_empty = not any(keep.iterdir())
    except OSError as error:
        fix = "name a new directory for --keep, in a place that you may write to"
        raise UserError(f"cannot use {keep}: {error.strerror}", fix) from error
    if not is_empty:
        raise UserError(f"{keep} is not empty", "name a new directory for --keep")
    yield keep.absolute()


def processes_left(directory: Path) -> int:
    """How many daemons of this directory's homes, and p2pds of theirs, are still there after a
    moment."""
    end_s = time.monotonic() + LEFT_AFTER_S
    while (count := _process_count(directory)) and time.monotonic() < end_s:
        time.sleep(POLL_S)
    return count


def _process_count(directory: Path) -> int:
    count = 0
    for process in psutil.process_iter(["pid", "cmdline"]):
        command = " ".join(process.info["cmdline"] or ())
        is_theirs = f"--home {directory}/" in command or f" -id={directory}/" in command
        count += is_theirs or writes_below(process.info["pid"], directory)
    return count


def writes_below(pid: int, directory: Path) -> bool:
    """Whether the process's standard output goes there: forks of a nursery have its command
    line."""
    try:
        return Path(os.readlink(f"/proc/{pid}/fd/1")).is_relative_to(directory)
    except OSError:
        return False
