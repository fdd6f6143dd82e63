"""A real daemon makes way while other programs use the machine, and comes back by itself. The test
says what the machine does: the daemon sees a `/proc/stat` of its own, in a mount namespace. On a
machine that others use, too, nobody could tell when it is free."""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from p2p_dtfm.daemon.machine.local_client import ask_daemon, call_daemon
from p2p_dtfm.daemon.machine.owner.yields import FREE_FOR_S, PATIENCE_S
from tests.e2e.helpers import DEADLINE_S, wait_until, write_endless_spec
from tests.programs import skip_without

STAT = Path("/proc/stat")
FASTER = 20
"""How much faster the machine's time runs. What this program's processes, also of other tests,
really use is then little of it."""
IN_NAMESPACE = 'mount --bind "$0" /proc/stat && exec "$@"'


def missing() -> str:
    probe = ["unshare", "--mount", "sh", "-c", IN_NAMESPACE, "/proc/stat", "true"]
    try:
        done = subprocess.run(probe, capture_output=True, timeout=10)
    except OSError:
        return "no unshare here"
    return "" if done.returncode == 0 else "no mount namespaces here: run as root"


pytestmark = [pytest.mark.nightly, skip_without("namespaces", missing())]


class Machine:
    """A machine that counts processor time as idle, or as some program's."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_busy = False
        self._user = self._idle = 0
        self._rest = re.sub(r"^cpu .*\n", "", STAT.read_text(), count=1)
        self._file = -1

    @contextmanager
    def running(self) -> Iterator[None]:
        self.path.touch()
        self._file = os.open(self.path, os.O_WRONLY)
        over = threading.Event()
        thread = threading.Thread(target=self._run, args=(over,))
        self._write()
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            os.close(self._file)

    def _run(self, over: threading.Event) -> None:
        before_s = time.monotonic()
        while not over.wait(0.2):
            now_s = time.monotonic()
            ticks = int((now_s - before_s) * 100 * FASTER * (os.cpu_count() or 1))
            before_s = now_s
            if self.is_busy:
                self._user += ticks
            else:
                self._idle += ticks
            self._write()

    def _write(self) -> None:
        """Write as many bytes each time, in one piece, so that a reader sees the old ones or the
        new ones."""
        line = f"cpu  {self._user:015} 0 0 {self._idle:015} 0 0 0 0 0 0\n"
        os.pwrite(self._file, (line + self._rest).encode(), 0)


def test_it_makes_way_and_comes_back(tmp_path: Path) -> None:
    home, machine = tmp_path / "home", Machine(tmp_path / "stat")
    home.mkdir()
    command = [sys.executable, "-m", "p2p_dtfm", "--home", str(home), "--threads", "1"]
    command += ["--run", str(write_endless_spec(tmp_path)), "--busy-percent", "50"]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0"]
    inside = ["unshare", "--mount", "sh", "-c", IN_NAMESPACE, str(machine.path), *command]

    def facts() -> dict:
        return ask_daemon(home, "status") or {"state": "", "step": 0}

    with machine.running(), (home / "log").open("wb") as log:
        process = subprocess.Popen(inside, stdout=log, stderr=log)
        try:
            wait_until(
                lambda: (facts().get("step") or 0) > 5, "it trains: its own work is no reason"
            )
            machine.is_busy, busy_s = True, time.monotonic()
            wait_until(lambda: facts()["state"] == "paused", "it makes way")
            assert time.monotonic() - busy_s >= PATIENCE_S["busy"] - 1, "not for a page that loads"
            assert "other programs use this computer" in facts()["reason"]
            time.sleep(5)
            assert facts()["state"] == "paused", "as long as they do"
            step = max(int(it.name.split("-")[1]) for it in home.glob("runs/*/checkpoints/*"))
            machine.is_busy, free_s = False, time.monotonic()
            wait_until(lambda: facts()["state"] == "training", "it comes back by itself")
            assert time.monotonic() - free_s >= FREE_FOR_S - 6, "once the machine was left alone"
            wait_until(lambda: (facts().get("step") or 0) > step, "and goes on where it was")
        finally:
            if process.poll() is None:
                call_daemon(home, "leave", "POST")
            assert process.wait(DEADLINE_S) == 0, (home / "log").read_text()[-2000:]
