"""A pause that ends by itself."""

import asyncio
import time
from pathlib import Path

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.hours import LONGEST_PAUSE_S, pause_seconds
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident


def test_it_ends_when_its_time_has_come_and_may_be_changed(tmp_path: Path) -> None:
    home = tmp_path / "home"
    resident = Resident(Settings(home=home, dashboard="off"))

    async def away() -> bool:
        staying = asyncio.create_task(resident._stay_away("for a test", False, time.time() + 3600))
        while not Home(home).socket.exists() and not staying.done():
            await asyncio.sleep(0.01)
        order = asyncio.to_thread(call_daemon, home, "pause-for?seconds=0.2", "POST")
        assert await order == {"state": "paused"}
        told = await asyncio.to_thread(call_daemon, home, "status")
        assert told["state"] == "paused" and "until" in told["reason"]
        return await asyncio.wait_for(staying, 20)

    assert asyncio.run(away()), "it takes part again"


def test_who_resumes_while_the_daemon_still_leaves_is_not_forgotten(tmp_path: Path) -> None:
    """The pause had begun, so it had to be waited for: nobody did, and it never ended."""
    life = Life(lambda: None)
    assert not life.resume(), "it is not paused"
    life.pause("for a test")
    assert life.resume() and life.leaving.is_set(), "what it has begun to hand over goes"
    resident = Resident(Settings(home=tmp_path / "home", dashboard="off"))
    assert life.pause_until_s is not None

    async def away() -> bool:
        staying = resident._stay_away("for a test", False, life.pause_until_s)
        return await asyncio.wait_for(staying, 20)

    assert asyncio.run(away())
    life.leave()
    assert not life.resume(), "for good"


def test_what_is_asked_for_is_bounded() -> None:
    assert pause_seconds({"seconds": "7200"}) == 7200
    assert pause_seconds({"seconds": "1e99"}) == LONGEST_PAUSE_S
    for odd in ("nan", "-5", "x", ""):
        assert pause_seconds({"seconds": odd}) == 0
