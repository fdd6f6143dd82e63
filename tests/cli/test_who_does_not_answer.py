"""A home whose process is there and does not answer: what is said of it is so, and what is advised
can be done."""

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine.local_client import PATIENCE_S, call_daemon

Holder = Callable[..., int]


@pytest.fixture
def held_by(tmp_path: Path) -> Iterator[Holder]:
    """Has a process with such a command line hold the home."""
    begun = []

    def begin(*words: str) -> int:
        command = [sys.executable, "-c", "import time; time.sleep(600)", *words]
        begun.append(subprocess.Popen(command))
        (tmp_path / "daemon.lock").write_text(str(begun[-1].pid))
        return begun[-1].pid

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def test_a_daemon_that_ctrl_z_has_stopped(held_by: Holder, tmp_path: Path) -> None:
    """It was advised to start one, which is refused where a daemon is already running."""
    process = held_by("p2p_dtfm", "--run", "tiny")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "daemon.sock"))
        listening.listen()
        with pytest.raises(UserError, match="listens and does not answer") as caught:
            call_daemon(tmp_path, "status", timeout_s=0.2)
    assert caught.value.exit_code == 4
    assert caught.value.fixes[0].endswith(f"kill -CONT {process}")


def test_a_bootstrap_node(held_by: Holder, tmp_path: Path) -> None:
    """It has no socket. It was said to start or end just now, after a wait, for as long as it was
    there. Who begins a second one in its home is told to look at it."""
    process = held_by("p2p_dtfm", "bootstrap", "--home", str(tmp_path))
    began_s = time.monotonic()
    with pytest.raises(UserError, match="a bootstrap node runs in") as caught:
        call_daemon(tmp_path, "status")
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert caught.value.exit_code == 4 and f"kill {process}" in caught.value.fixes[0]


def test_a_daemon_in_a_home_of_that_name(held_by: Holder, tmp_path: Path) -> None:
    held_by("p2p_dtfm", "--home", "bootstrap")
    with pytest.raises(UserError, match="it starts or ends just now"):
        call_daemon(tmp_path, "status", patience_s=0.2)
