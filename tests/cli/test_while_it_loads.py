"""On a busy machine a program takes half a minute to load. A user who watches is told so, and a
user who presses Ctrl-C is let go."""

import asyncio
import logging
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine import local_client
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node import resident

CTRL_C_AT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class CtrlC:
    def find_spec(self, name, *rest):
        if name == wanted:
            signal.raise_signal(signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, CtrlC())
from p2p_dtfm.cli import main
main()
"""
"""Sends Ctrl-C at the moment at which that module begins to be loaded, as from a screen. Tests may
run as a background job, which Ctrl-C does not end, and neither does it end what they start."""


@pytest.mark.parametrize("loaded", ["p2p_dtfm.cli.app", "p2p_dtfm.daemon.node.daemon"])
def test_ctrl_c_ends_it_at_once_and_without_pages_about_it(loaded: str, tmp_path: Path) -> None:
    """Python's own answer was a traceback at first. Later there was no answer at all, until all was
    loaded."""
    line = ["--run", "tiny", "--home", str(tmp_path / "home"), "--dashboard", "off"]
    ended = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT, loaded, *line],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, "")
    assert all("loads the program" in line for line in ended.stderr.splitlines())


SIGNAL_AT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
class Sent:
    def find_spec(self, name, *rest):
        if name == wanted:
            os.kill(os.getpid(), number)
            time.sleep(5)
            os._exit(0 if os.getpid() == 1 else 1)
wanted, number = sys.argv.pop(1), int(sys.argv.pop(1))
sys.meta_path.insert(0, Sent())
from p2p_dtfm.cli import main
main()
"""
AS_THE_FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
"""Begins a program as the first process of a container, in which it has the number 1."""


@pytest.mark.parametrize("loaded", ["p2p_dtfm.cli.app", "p2p_dtfm.daemon.node.daemon"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_process_of_a_container_ends_too(
    loaded: str, number: signal.Signals, tmp_path: Path
) -> None:
    """The kernel drops each signal to it that has no handler. So neither Ctrl-C nor `podman stop`
    counted while it loaded: it took part then, and was killed when the time for that was over."""
    if subprocess.run([*AS_THE_FIRST, "true"], capture_output=True).returncode:
        pytest.skip("this system lets nobody begin a container")
    line = ["--run", "tiny", "--home", str(tmp_path / "home"), "--dashboard", "off"]
    ended = subprocess.run(
        [*AS_THE_FIRST, sys.executable, "-c", SIGNAL_AT, loaded, str(int(number)), *line],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout) == (128 + number, "")
    assert all("loads the program" in line for line in ended.stderr.splitlines())


def test_meanwhile_the_screen_goes_on_and_others_are_told_that_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The screen stood still at 0 s, and `status` said that nothing had been started there. A
    second daemon in that home, too, was told of the first one only once that had loaded."""
    (tmp_path / "loads_for_long.py").write_text("import time\ntime.sleep(1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(resident, "_TRAINS", "loads_for_long")
    # who asks here is this process, too, where a command is another one
    monkeypatch.setattr(local_client, "os", SimpleNamespace(getpid=lambda: 0))
    home = tmp_path / "home"
    starting = resident.Resident(Settings(home=home, dashboard="off"))

    async def watched() -> list[str]:
        told, loading = [], asyncio.create_task(starting._load_what_trains())
        await asyncio.sleep(0.1)
        while not loading.done():
            for ask in (Home(home).acquire, partial(call_daemon, home, "status", patience_s=0)):
                with pytest.raises(UserError) as error:
                    ask()
                told.append(error.value.cause)
            await asyncio.sleep(0.2)
        await loading
        Home(home).acquire()
        return told

    caplog.set_level(logging.INFO, "p2p_dtfm")
    here, starts, *more = asyncio.run(watched())
    assert caplog.messages[0] == "loads the program"
    assert "a daemon is already running in" in here
    assert starts.endswith("does not answer yet: it starts or ends just now")
    assert len(more) >= 2


def test_what_is_shown_before_there_is_a_daemon_has_its_reason_and_since_when() -> None:
    host = DashboardHost()
    first = host.state().live
    time.sleep(0.05)
    later = host.state().live
    assert first.reason == "loads the program"
    assert later.since_s == first.since_s < later.time_s
