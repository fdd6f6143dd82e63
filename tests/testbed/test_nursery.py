"""Forks of a nursery are processes of their own, and their end is told."""

import array
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from p2p_dtfm.testbed.nursery import NURSERY, ForkedProcess

MODULE = "tests.testbed.said_by_a_fork"
MANY_FILES = 2048


def fork(directory: Path, *arguments: str) -> ForkedProcess:
    with (directory / "out").open("wb") as output, (directory / "err").open("wb") as errors:
        return NURSERY.start(MODULE, arguments, output, errors)


def test_it_has_its_arguments_streams_and_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SAID", "so")
    child = fork(tmp_path, "echo", "7")
    assert child.stdin is not None
    child.stdin.write(b"heard\n")
    assert child.wait(60) == 7
    assert (tmp_path / "out").read_text() == "so heard\n"
    assert child.poll() == 7
    child.kill()  # nobody else's process, whose number it may be now


def test_a_large_environment_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(6):
        monkeypatch.setenv(f"LARGE_{number}", "x" * 100_000)
    assert fork(tmp_path, "draw").wait(60) == 0


def test_an_exception_is_shown_and_ends_it_with_1(tmp_path: Path) -> None:
    child = fork(tmp_path, "raise")
    assert child.wait(60) == 1
    assert "RuntimeError: as told" in (tmp_path / "err").read_text()


def test_a_signal_ends_it_and_nobody_else(tmp_path: Path) -> None:
    one, other = fork(tmp_path, "echo", "0"), fork(tmp_path, "echo", "0")
    with pytest.raises(subprocess.TimeoutExpired):
        one.wait(0.01)
    one.send_signal(signal.SIGKILL)
    assert one.wait(60) == -signal.SIGKILL
    assert other.poll() is None
    assert other.stdin is not None
    other.stdin.close()
    assert other.wait(60) == 0


def test_all_draw_chances_of_their_own(tmp_path: Path) -> None:
    drawn = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        assert fork(tmp_path / str(number), "draw").wait(60) == 0
        drawn.append((tmp_path / str(number) / "out").read_text())
    assert drawn[0] != drawn[1]


def test_who_goes_while_it_loads_is_shown_no_traceback() -> None:
    """Ctrl-C at the beginning of a demo ended in one, on its user's terminal."""
    near, far = socket.socketpair()
    request = {"module": MODULE, "arguments": ["draw"], "environment": dict(os.environ),
               "directory": os.getcwd()}  # fmt: skip
    body = json.dumps(request).encode()
    with open(os.devnull, "r+b") as nothing:
        streams = array.array("i", [nothing.fileno()] * 4)
        near.sendmsg(
            [struct.pack("<I", len(body))], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)]
        )
    near.sendall(body)
    near.close()
    nursery = subprocess.run(
        [sys.executable, "-m", "p2p_dtfm.testbed.nursery", str(far.fileno())],
        pass_fds=[far.fileno()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    far.close()
    assert (nursery.returncode, nursery.stderr) == (0, "")


def test_it_ends_with_who_started_it(tmp_path: Path) -> None:
    starts = (
        "from pathlib import Path\n"
        "from tests.testbed.test_nursery import fork\n"
        "from p2p_dtfm.testbed.nursery import NURSERY\n"
        f"child = fork(Path({str(tmp_path)!r}), 'echo', '0')\n"
        "print(NURSERY._process.pid)\n"
    )
    done = subprocess.run([sys.executable, "-c", starts], stdout=subprocess.PIPE, check=True)
    nursery = Path(f"/proc/{int(done.stdout)}")
    for _ in range(600):
        if not nursery.exists() or "Z (" in (nursery / "status").read_text():
            return
        signal.sigtimedwait([], 0.05)
    raise AssertionError("the nursery is still there")


def test_nothing_stays_open_of_who_has_ended(tmp_path: Path) -> None:
    """A storm of kills reached the limit of descriptors at its 330th kill: each left three open."""
    fork(tmp_path, "draw").wait(60)  # the nursery itself stays
    before = len(os.listdir("/proc/self/fd"))
    for ended in range(3):
        child = fork(tmp_path, "echo", "0")
        if ended:
            child.kill()
        elif child.stdin is not None:
            child.stdin.close()
        child.wait(60)
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_end_is_heard_beside_a_thousand_open_files(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < MANY_FILES:
        pytest.skip(f"this machine lets nobody open {MANY_FILES} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, MANY_FILES), hard))
    opened = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        child = fork(tmp_path, "echo", "3")
        assert child.poll() is None
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 3
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
