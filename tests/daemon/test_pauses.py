"""A pause that ends by itself."""

import asyncio
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.machine import life as life_module
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.hours import LONGEST_PAUSE_S, for_a_while, pause_seconds
from p2p_dtfm.daemon.machine.life import Life, Standstill
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.owner.sights import OwnerSight
from p2p_dtfm.daemon.machine.owner.yields import REASONS, Yields
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node import resident as resident_module
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.node.returning import TRY_AGAIN_S
from p2p_dtfm.daemon.node.time_away import TimeAway
from p2p_dtfm.ports import now
from p2p_dtfm.web.api import LocalApi, make_app, refusal_answer


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


class _Clock(now.MachineClock):
    """A clock that may be set, on a machine that lives as long as the test says."""

    def __init__(self) -> None:
        self.lived_s = self.set_by_s = 0.0

    def wall_ns(self) -> int:
        return round((1e9 + self.lived_s + self.set_by_s) * 1e9)

    def awake_or_asleep_ns(self) -> int:
        return round(self.lived_s * 1e9)


@pytest.mark.parametrize("is_asked", [False, True])
def test_who_sets_the_clock_back_makes_no_pause_longer(is_asked: bool) -> None:
    """Many machines start with a clock that is hours ahead, until they hear the time. A service
    that found nobody in that minute was to try again in five, and did so hours later."""

    async def away() -> None:
        clock = _Clock()
        now.live_by(clock)
        until_s = now.wall_s() + TRY_AGAIN_S
        time_away = TimeAway("a test", False, until_s, lambda: None, lambda: None)
        if is_asked:
            await time_away.pause_for({"seconds": str(TRY_AGAIN_S)})
        clock.set_by_s = -7200.0
        for clock.lived_s, is_over in ((TRY_AGAIN_S - 1, False), (TRY_AGAIN_S, True)):
            await time_away.look_at_the_clock()
            assert time_away.by_itself == is_over
        await time_away.pause()
        clock.lived_s *= 2
        await time_away.look_at_the_clock()
        assert not time_away.by_itself, "a pause without an end"

    asyncio.run(away())


def test_a_pause_that_goes_on_for_another_reason_says_so() -> None:
    """With `--hours 22-07`, a laptop on its battery said at eleven that it takes part from ten
    on."""

    async def away() -> None:
        time_away = TimeAway("outside of its hours", True, None, lambda: None, lambda: None)
        time_away.begin()
        for reason in ("outside of its hours", "on battery", "on battery"):
            time_away.goes_on_for(reason)
            assert time_away.status.reason == reason

    asyncio.run(away())


def test_a_pause_that_ends_outside_of_its_hours_is_over_when_they_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With `--hours 22-07`, a daemon paused for two hours at six. It took part from eight until the
    next morning."""
    monkeypatch.setattr(resident_module, "LOOK_EVERY_S", 0.05)
    home, clock = tmp_path / "home", [datetime(2026, 3, 1, 8, 0)]
    settings = Settings(home=home, dashboard="off", hours="22-07", on_battery=True, on_metered=True)
    resident = Resident(settings, lambda: clock[0])

    async def away() -> bool:
        staying = asyncio.create_task(resident._stay_away("asked", False, time.time() - 1))
        told = {"reason": ""}
        async with asyncio.timeout(20):
            while "22:00-07:00" not in told["reason"]:  # other programs are asked first
                await asyncio.sleep(0.1)
                assert not staying.done(), "by day it is not wanted"
                if Home(home).socket.exists():
                    told = await asyncio.to_thread(call_daemon, home, "status")
        assert told["state"] == "paused"
        order = asyncio.to_thread(call_daemon, home, "pause-for?seconds=0.2", "POST")
        assert await order == {"state": "paused"}
        await asyncio.sleep(1.0)
        assert not staying.done(), "nor after another pause"
        clock[0] = datetime(2026, 3, 1, 22, 30)
        return await asyncio.wait_for(staying, 20)

    assert asyncio.run(away())


@pytest.mark.parametrize(("has_paused", "why"), [(False, None), (True, "by day it is not wanted")])
def test_who_asks_for_a_pause_while_it_is_looked_whether_to_go_on_has_one(
    has_paused: bool, why: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon asks other programs about its owner's machine, which takes a moment. A pause
    answered in that moment was not kept, or was said to end with the hours."""
    monkeypatch.setattr(resident_module, "LOOK_EVERY_S", 0.05)
    home = tmp_path / "home"
    resident = Resident(Settings(home=home, dashboard="off", on_battery=True, on_metered=True))
    looks, answers = asyncio.Event(), asyncio.Event()

    async def slowly() -> str | None:
        looks.set()
        await answers.wait()
        return why

    monkeypatch.setattr(resident, "_not_now", slowly)

    async def away() -> None:
        until_s = time.time() - 1 if has_paused else None
        staying = asyncio.create_task(resident._stay_away("asked", not has_paused, until_s))
        await asyncio.wait_for(looks.wait(), 20)
        assert await asyncio.to_thread(call_daemon, home, "pause", "POST") == {"state": "paused"}
        answers.set()
        await asyncio.sleep(0.5)
        assert not staying.done()
        told = await asyncio.to_thread(call_daemon, home, "status")
        assert "p2p-dtfm resume ends it" in told["reason"]
        await asyncio.to_thread(call_daemon, home, "leave", "POST")
        assert not await asyncio.wait_for(staying, 20)

    asyncio.run(away())


def test_who_is_away_for_weeks_says_until_which_day() -> None:
    """Of a pause of thirty days the user was told only a day of the week."""
    at = time.mktime((2026, 3, 1, 9, 30, 0, 0, 0, -1))
    assert "until Sunday 09:30;" in for_a_while(at, at - 86_400)
    assert "until Sunday 2026-03-01 09:30;" in for_a_while(at, at - 20 * 86_400)


def test_who_resumes_while_the_daemon_still_leaves_is_not_forgotten(tmp_path: Path) -> None:
    """The pause had begun, so something had to wait for its end. Nothing did, and it never
    ended."""
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


def test_the_last_word_of_the_user_counts_while_the_daemon_still_leaves() -> None:
    """After `pause`, `resume` and `pause` again, the daemon came back. So did one that was given
    two hours after a pause without an end, or while the hours ended."""
    life = Life(lambda: None)
    assert life.pause("asked for") and life.resume()
    assert life.pause("for two hours", 7200.0, is_asked=True)
    assert (life.pause_reason, life.pause_until_s) == ("for two hours", 7200.0)
    assert life.pause("asked for", is_asked=True) and life.pause_until_s is None
    assert life.pause("the hours end"), "it is away all the same"
    assert life.pause_reason == "asked for", "and does not come back when they begin"
    life.leave()
    assert not life.pause("asked for", is_asked=True) and life.pause_reason is None, "for good"


def test_who_resumes_while_it_makes_way_takes_part_in_spite_of_what_is_in_the_way(
    tmp_path: Path,
) -> None:
    """The daemon came back, saw the battery, and left again."""
    resident = Resident(Settings(home=tmp_path / "home", dashboard="off"))
    on_battery = OwnerSight(on_battery=True)
    resident._yields = yields = Yields(False, False, 0, lambda: on_battery)

    async def away() -> str | None:
        assert await yields.reason() == REASONS["battery"]
        life = Life(lambda: None)
        life.pause(REASONS["battery"])
        assert life.resume()
        staying = resident._stay_away(REASONS["battery"], True, life.pause_until_s)
        assert await asyncio.wait_for(staying, 20)
        return await yields.reason()

    assert asyncio.run(away()) is None


def test_a_paused_daemon_says_that_it_is_when_it_is_asked_for_what_it_cannot_do(
    tmp_path: Path,
) -> None:
    """Callers were told that daemon and command are of different versions."""
    home = tmp_path / "home"
    resident = Resident(Settings(home=home, dashboard="off"))
    asked = {"invite?seconds=60": "POST", "revoke?who=x": "POST", "trace?steps=1": "GET"}

    async def causes() -> list[str]:
        staying = asyncio.create_task(resident._stay_away("for a test", False))
        while not Home(home).socket.exists() and not staying.done():
            await asyncio.sleep(0.01)
        found = []
        for name, method in asked.items():
            with pytest.raises(UserError) as refused:
                await asyncio.to_thread(call_daemon, home, name, method)
            found.append(refused.value.cause)
            assert "p2p-dtfm resume" in refused.value.fixes[0]
        await asyncio.to_thread(call_daemon, home, "resume", "POST")
        await asyncio.wait_for(staying, 20)
        return found

    assert all("paused" in cause for cause in asyncio.run(causes()))


def test_what_is_asked_for_is_bounded() -> None:
    assert pause_seconds({"seconds": "7200"}) == 7200
    assert pause_seconds({"seconds": "1e99"}) == LONGEST_PAUSE_S
    for odd in ("nan", "-5", "x", ""):
        assert pause_seconds({"seconds": odd}) == 0


def test_what_a_daemon_refuses_its_command_says(tmp_path: Path) -> None:
    """`resume` did not read the answer. It said of a daemon that left for good that it would join
    the others again."""
    home = Home(tmp_path)

    async def refuses() -> dict[str, object]:
        return refusal_answer(UserError("it ends", ("start it again",)))

    async def asked() -> None:
        api = LocalApi(make_app({}, {"resume": refuses}), home.socket)
        await api.start()
        try:
            await asyncio.to_thread(call_daemon, home.root, "resume", "POST")
        finally:
            await api.close()

    with pytest.raises(UserError, match="it ends") as refused:
        asyncio.run(asked())
    assert refused.value.fixes == ("start it again",)


def test_a_bug_in_a_daemon_is_not_called_another_version(tmp_path: Path) -> None:
    home = Home(tmp_path)

    async def fails() -> dict[str, object]:
        raise RuntimeError("a bug")

    async def asked(name: str) -> None:
        api = LocalApi(make_app({}, {"resume": fails}), home.socket)
        await api.start()
        try:
            await asyncio.to_thread(call_daemon, home.root, name, "POST")
        finally:
            await api.close()

    with pytest.raises(UserError, match="answers 500 to POST resume") as refused:
        asyncio.run(asked("resume"))
    assert "log" in refused.value.fixes[0]
    with pytest.raises(UserError, match="answers 404 to POST other") as unknown:
        asyncio.run(asked("other"))
    assert "the same version" in unknown.value.fixes[0]


def test_a_bug_in_looking_costs_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The look is at the owner's hours, battery and load. Without a report nobody would see that
    the daemon does not make way for them."""
    monkeypatch.setattr(life_module, "AFTER_A_BUG_S", 0.01)
    resident = Resident(Settings(home=tmp_path / "home", dashboard="off"))
    looks: list[object] = [RuntimeError("a bug"), "the computer runs on its battery"]
    paused: list[str] = []

    class Owner:
        async def reason(self) -> object:
            if isinstance(looks[0], Exception):
                raise looks.pop(0)  # type: ignore[misc]
            return looks[0]

    resident._yields = Owner()  # type: ignore[assignment]

    class Daemon:
        pause_reason = None
        run_digest = ""

        def __init__(self) -> None:
            self.observer = type("Observer", (), {"state": staticmethod(resident.state)})()

        def pause(self, reason: str) -> None:
            paused.append(reason)

        async def run(self, past: object) -> int:
            await asyncio.sleep(0.3)
            return 0

    async def scenario() -> None:
        assert await resident._take_part_within_hours(Daemon(), None) == 0  # type: ignore[arg-type]
        assert paused == ["the computer runs on its battery"]

    asyncio.run(scenario())


class Clocks:
    """The clocks of a machine that sleeps, or whose wall clock is set."""

    def __init__(self) -> None:
        self.awake_s, self.asleep_s, self.set_by_s = 1000.0, 0.0, 0.0

    def monotonic_ns(self) -> int:
        return round(self.awake_s * 1e9)

    def awake_or_asleep_ns(self) -> int:
        return round((self.awake_s + self.asleep_s) * 1e9)

    def wall_ns(self) -> int:
        return self.awake_or_asleep_ns() + round(self.set_by_s * 1e9)

    def block_ns(self, duration_ns: int) -> None:
        raise AssertionError("nothing waits")


@pytest.fixture
def clocks() -> Iterator[Clocks]:
    clocks = Clocks()
    before = now._CLOCK.set(clocks)
    yield clocks
    now._CLOCK.reset(before)


def test_who_stood_still_can_say_so_when_the_others_have_gone_on(clocks: Clocks) -> None:
    """The machine slept, or was busy. Its user heard "rejoins: view 17 has succeeded 16 without
    this peer", and nothing of why."""
    standstill = Standstill()

    def after(seconds: float) -> str:
        clocks.awake_s += seconds
        standstill.look()
        return standstill.lately()

    assert after(1.0) == "", "a loop that is a little late"
    assert "stood still for 20 s" in after(20.0)
    assert "stood still for 20 s" in after(3.0), "the longest"
    for _ in range(60):
        after(1.0)
    assert standstill.lately() == "", "that is long over"
    clocks.asleep_s += 7.0
    assert "stood still for 7 s" in standstill.lately(), "before anybody has looked"


def test_a_clock_that_is_set_is_no_standstill(clocks: Clocks) -> None:
    """A clock put right by 47 days was told as a sleep of that length. A clock put back hid a
    sleep."""
    standstill = Standstill()
    clocks.set_by_s += 47 * 86_400.0
    standstill.look()
    assert standstill.lately() == ""
    clocks.set_by_s -= 86_400.0
    clocks.asleep_s += 20.0
    standstill.look()
    assert "stood still for 20 s" in standstill.lately()
    clocks.set_by_s += 3_600.0
    assert "stood still for 20 s" in standstill.lately(), "nor is it over sooner"
