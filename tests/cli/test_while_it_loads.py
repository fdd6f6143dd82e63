"""What a program loads takes half a minute where a machine does much else: who watches is told so,
and whoever thinks better of it is let go."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.node import resident

CTRL_C_AT = """
import signal, sys
class CtrlC:
    def find_spec(self, name, *rest):
        if name == wanted:
            signal.raise_signal(signal.SIGINT)
wanted = sys.argv.pop(1)
sys.meta_path.insert(0, CtrlC())
from p2p_dtfm.cli import main
main()
"""
"""At the moment at which that module begins to be loaded."""


@pytest.mark.parametrize("loaded", ["p2p_dtfm.cli.program", "p2p_dtfm.daemon.node.daemon"])
def test_ctrl_c_ends_it_at_once_and_without_pages_about_it(loaded: str, tmp_path: Path) -> None:
    """Python's own answer was a traceback at first; later nothing at all, until all was loaded."""
    line = ["--run", "tiny", "--home", str(tmp_path / "home"), "--dashboard", "off"]
    ended = subprocess.run(
        [sys.executable, "-c", CTRL_C_AT, loaded, *line],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_meanwhile_the_screen_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It stood still at "starting for 0 s"."""
    (tmp_path / "loads_for_long.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.syspath_prepend(tmp_path)

    async def turns_meanwhile() -> int:
        turns, loading = 0, asyncio.create_task(resident._loaded("loads_for_long"))
        while not loading.done():
            turns += 1
            await asyncio.sleep(0.02)
        assert (await loading).__name__ == "loads_for_long"
        return turns

    assert asyncio.run(turns_meanwhile()) > 5


def test_what_is_shown_before_there_is_a_daemon_has_its_reason_and_since_when() -> None:
    host = DashboardHost()
    first = host.state().live
    time.sleep(0.05)
    later = host.state().live
    assert first.reason == "loads the program"
    assert later.since_s == first.since_s < later.time_s
