"""A home whose daemon is gone is known as such, even if another process has got the daemon's number
since."""

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.home import DEVICES
from p2p_dtfm.daemon.machine.local_client import call_daemon, homes_here


def lock(root: Path, process: int, taken_s: float) -> None:
    root.mkdir(parents=True, exist_ok=True)
    path = root / "daemon.lock"
    path.write_text(str(process))
    os.utime(path, (taken_s, taken_s))


@pytest.fixture
def another() -> Iterator[int]:
    """A program that began now, and is no daemon of ours."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process.pid
        process.kill()


def test_a_number_that_another_program_has_got_since_is_no_daemon(
    tmp_path: Path, another: int
) -> None:
    """This happens after a restart of the machine: each command waited, and said that the daemon
    starts."""
    lock(tmp_path, another, time.time() - 3600)
    lock(tmp_path / DEVICES / "2", another, time.time() - 3600)
    with pytest.raises(UserError, match="no daemon answers"):
        call_daemon(tmp_path, "status", patience_s=30.0)
    assert homes_here(tmp_path) == [tmp_path]


def test_who_began_before_it_took_the_home_is(tmp_path: Path) -> None:
    lock(tmp_path, os.getppid(), time.time())
    lock(tmp_path / DEVICES / "2", os.getppid(), time.time())
    with pytest.raises(UserError, match="does not answer yet"):
        call_daemon(tmp_path, "status", patience_s=0.0)
    assert homes_here(tmp_path) == [tmp_path, tmp_path / DEVICES / "2"]


@pytest.mark.parametrize("text", ["", "-1", "x", "9" * 30, "0"])
def test_a_lock_that_names_no_process_is_nobodys(text: str, tmp_path: Path) -> None:
    (tmp_path / "daemon.lock").write_text(text)
    with pytest.raises(UserError, match="no daemon answers"):
        call_daemon(tmp_path, "status", patience_s=30.0)
