"""A daemon makes way for its machine's owner (battery, metered lines, other programs), and comes
back."""

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.owner import sights, yields
from p2p_dtfm.daemon.machine.owner.sights import OwnerSight, ProcessorUse
from p2p_dtfm.daemon.machine.owner.yields import REASONS, Yields, yields_of
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.ports.now import live_by

PMON = """\
# gpu         pid   type     sm    mem    enc    dec    jpg    ofa    command
# Idx           #    C/G      %      %      %      %      %      %    name
    0       1111     C     45     10      -      -      -      -    python
    0       2222   C+G     30      4      -      -      -      -    game
    0       3333     G     12      1      -      -      -      -    Xorg
    1          -     -      -      -      -      -      -      -    -
"""


class Hand:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.s = 1000.0

    def monotonic_ns(self) -> int:
        return round(self.s * 1e9)

    wall_ns = awake_or_asleep_ns = monotonic_ns

    def block_ns(self, duration_ns: int) -> None:
        raise AssertionError


def told(
    yields: Yields,
    clock: Hand,
    sights: list[OwnerSight],
    into: list[OwnerSight],
    each_s: float = 5.0,
) -> list[str | None]:
    """What the daemon says at each of these sights, one after another."""

    async def look() -> list[str | None]:
        live_by(clock)
        found = []
        for sight in sights:
            into[:] = [sight]
            found.append(await yields.reason())
            clock.s += each_s
        return found

    return asyncio.run(look())


def test_a_plug_that_is_pulled_for_a_moment_is_nothing_and_one_that_stays_out_is() -> None:
    seen: list[OwnerSight] = []
    judge, clock = Yields(False, False, 0, lambda: seen[0]), Hand()
    plugged, pulled = OwnerSight(), OwnerSight(on_battery=True)
    assert told(judge, clock, [plugged, pulled, plugged, plugged], seen) == [None] * 4
    said = told(judge, clock, [pulled] * 3, seen)
    assert said == [None, None, REASONS["battery"]]
    back = told(judge, clock, [plugged] * 13, seen)
    assert back[:11] == [REASONS["battery"]] * 11, "for a minute it does not trust the plug"
    assert back[-1] is None


def test_who_starts_on_battery_does_not_begin() -> None:
    seen: list[OwnerSight] = []
    judge = Yields(False, False, 0, lambda: seen[0])
    assert told(judge, Hand(), [OwnerSight(on_battery=True)], seen) == [REASONS["battery"]]
    judge, clock = Yields(True, False, 0, lambda: seen[0]), Hand()
    assert told(judge, clock, [OwnerSight(on_battery=True)] * 9, seen) == [None] * 9
    assert told(judge, clock, [OwnerSight(is_metered=True)] * 9, seen)[-1] == REASONS["metered"]


def test_other_programs_count_from_the_given_share_on_and_if_they_stay() -> None:
    seen: list[OwnerSight] = []
    judge, clock = Yields(False, False, 40, lambda: seen[0]), Hand()
    calm, busy = OwnerSight(busy_share=0.39), OwnerSight(busy_share=0.41)
    assert told(judge, clock, [calm] * 20, seen) == [None] * 20
    said = told(judge, clock, [busy] * 8, seen)
    assert said == [None] * 6 + [REASONS["busy"]] * 2
    assert told(judge, clock, [calm, busy, calm], seen) == [REASONS["busy"]] * 3, (
        "a pause in a game"
    )


def test_who_resumes_takes_part_until_what_was_in_the_way_has_passed() -> None:
    seen: list[OwnerSight] = []
    judge, clock = Yields(False, False, 0, lambda: seen[0]), Hand()
    pulled, plugged = OwnerSight(on_battery=True), OwnerSight()
    assert told(judge, clock, [pulled], seen) == [REASONS["battery"]]
    judge.waive()
    assert told(judge, clock, [pulled] * 100, seen) == [None] * 100
    assert told(judge, clock, [plugged] * 13, seen) == [None] * 13
    assert told(judge, clock, [pulled] * 3, seen)[-1] == REASONS["battery"], "the next time"


def test_an_experiment_on_loopback_makes_way_for_nobody_unless_asked_to(tmp_path: Path) -> None:
    here = Settings(home=tmp_path, listen=("/ip4/127.0.0.1/tcp/0",))
    assert yields_of(here) is None
    assert yields_of(here.model_copy(update={"busy_percent": 50})) is not None
    assert yields_of(Settings(home=tmp_path)) is not None
    assert yields_of(Settings(home=tmp_path, on_battery=True, on_metered=True)) is None


def test_a_device_is_as_busy_as_others_make_it() -> None:
    share = sights.devices_busy_share(lambda command: PMON, lambda pid: pid == 1111)
    assert share == pytest.approx(0.42)
    assert sights.devices_busy_share(lambda command: "") == 0


def supply(directory: Path, name: str, **says: str) -> None:
    """One of the kernel's power supplies."""
    (directory / name).mkdir(parents=True)
    for what, word in says.items():
        (directory / name / what).write_text(f"{word}\n")


@pytest.mark.parametrize(
    ("status", "online", "is_on_it"),
    [
        ("Discharging", "0", True),
        ("Charging", "1", False),
        ("Full", "1", False),
        ("Not charging", "1", False),
        ("Discharging", "1", False),  # a charger that is too weak
        ("Unknown", "0", False),
    ],
)
def test_a_laptop_is_on_battery_while_that_is_emptied_and_nothing_feeds_it(
    tmp_path: Path, status: str, online: str, is_on_it: bool
) -> None:
    supply(tmp_path, "ADP1", type="Mains", online=online)
    supply(tmp_path, "BAT0", type="Battery", status=status, capacity="70")
    assert sights.on_battery(tmp_path) is is_on_it


def test_the_second_battery_counts_and_so_does_a_charger_at_another_port(tmp_path: Path) -> None:
    supply(tmp_path, "AC", type="Mains", online="0")
    supply(tmp_path, "BAT0", type="Battery", status="Full", capacity="100")
    supply(tmp_path, "BAT1", type="Battery", status="Discharging", capacity="40")
    assert sights.on_battery(tmp_path)
    supply(tmp_path, "ucsi-source-psy-USBC000:001", type="USB", online="1")
    assert not sights.on_battery(tmp_path)


def test_a_desktop_with_a_wireless_mouse_does_not_run_on_the_batteries_of_that(
    tmp_path: Path,
) -> None:
    says = {"type": "Battery", "scope": "Device", "status": "Discharging", "capacity": "55"}
    supply(tmp_path, "hidpp_battery_0", **says)
    assert not sights.on_battery(tmp_path)
    assert not sights.on_battery(tmp_path / "none")


@pytest.mark.parametrize(
    ("answer", "metered"),
    [("u 1", True), ("u 3", True), ("u 2", False), ("u 4", False), ("u 0", False), ("", False)],
)
def test_metered_as_the_network_manager_has_it(answer: str, metered: bool) -> None:
    assert sights.is_metered(lambda command: answer) is metered


def test_what_others_use_is_seen_and_what_is_ours_is_not() -> None:
    """A process that loads a core stands for another program, and then for one of ours."""
    for extra, is_ours in (("x", False), ("p2p_dtfm", True)):
        use = ProcessorUse()
        turning = subprocess.Popen([sys.executable, "-c", "while True: pass", extra])
        try:
            time.sleep(0.3)
            use.share()
            process, began_s = psutil.Process(turning.pid), time.monotonic()
            before_s = process.cpu_times().user
            time.sleep(1.0)
            share = use.share()
            ran = (process.cpu_times().user - before_s) / (time.monotonic() - began_s)
            assert (turning.pid in sights._own_times()) is is_ours
        finally:
            turning.kill()
            turning.wait()
        if not is_ours:
            assert share > 0.7 * ran / (psutil.cpu_count() or 1) > 0
    assert sights.is_ours(["python", "-m", "p2p_dtfm"])
    assert sights.is_ours(["python", "-m", "p2p_dtfm.cli.commands.away", "5"]), "while paused"
    assert sights.is_ours(["/x/p2pd", "-b"])
    assert not sights.is_ours(["/usr/bin/game", "--level", "p2p"])


def test_it_stays_away_while_the_owner_needs_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started on battery, the daemon waits. Once the plug is in again it takes part by itself."""
    plugged = False
    monkeypatch.setattr(yields, "on_battery", lambda: not plugged)
    monkeypatch.setattr(yields, "is_metered", lambda: False)
    monkeypatch.setattr(yields, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(yields, "FREE_FOR_S", 0.3)
    home = tmp_path / "home"
    resident = Resident(Settings(home=home, dashboard="off", notify=False))

    async def away() -> bool:
        nonlocal plugged
        why = await resident._not_now()
        assert why == REASONS["battery"]
        staying = asyncio.create_task(resident._stay_away(why, by_itself=True))
        while not Home(home).socket.exists() and not staying.done():
            await asyncio.sleep(0.01)
        seen = await asyncio.to_thread(call_daemon, home, "status")
        assert seen["state"] == "paused" and "battery" in seen["reason"]
        await asyncio.sleep(2.5)
        assert not staying.done()
        plugged = True
        return await asyncio.wait_for(staying, 20)

    assert asyncio.run(away())


def test_a_process_that_takes_a_paused_ones_place_does_not_come_back_at_once(
    tmp_path: Path,
) -> None:
    seen: list[OwnerSight] = []
    judge = yields_of(Settings(home=tmp_path, busy_percent=50), REASONS["busy"])
    assert judge is not None
    judge._look = lambda: seen[0]
    clock = Hand()

    async def first() -> str | None:
        live_by(clock)
        judge.note_away_for(REASONS["busy"])
        seen[:] = [OwnerSight()]
        return await judge.reason()

    assert asyncio.run(first()) == REASONS["busy"], "two looks tell what others use"
    assert told(judge, clock, [OwnerSight()] * 14, seen)[-1] is None
