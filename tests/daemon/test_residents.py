"""A program that stays resident, from one daemon to the next: with which settings it comes back,
and whether it does."""

import asyncio
import errno
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.machine import away as away_module
from p2p_dtfm.daemon.machine.away import Away, StepAside, as_plain, received
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.life import RESUMED_S, is_a_service
from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.node import resident as resident_module
from p2p_dtfm.daemon.node import returning
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.daemon.peers.home_memory import write_memory
from p2p_dtfm.daemon.telemetry.attention.watch import Notice
from p2p_dtfm.web.state import DashboardState, Live
from tests.daemon.test_memory import memory_of, place_of


class Acting:
    """A daemon that does what a scene has written for it."""

    def __init__(self, settings: Settings, act: Callable[["Acting"], Awaitable[int]]) -> None:
        self.settings = settings
        self.pause_reason: str | None = None
        self.pause_until_s: float | None = None
        self.run_digest = ""
        self.has_begun = False
        self.is_to_leave = False
        self.observer = SimpleNamespace(state=DashboardHost().state)
        self._act = act

    def acquaintances(self) -> tuple[str, ...]:
        return ()

    def status_json(self) -> dict[str, object]:
        return {}

    def come_as_founder(self) -> None:
        pass

    def pause(self, reason: str) -> None:
        self.pause_reason = reason

    async def run(self, past: object) -> int:
        return await self._act(self)


class Staged(Resident):
    """A resident whose daemons do one act each. Of its times away it notes the reasons, and it ends
    them."""

    def __init__(
        self,
        settings: Settings,
        acts: Sequence[Callable[[Acting], Awaitable[int]]],
        clock: Callable[[], datetime] = datetime.now,
        loads: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(settings, clock)
        self.daemons: list[Acting] = []
        self.away_for: list[str] = []
        self.away_until_s: list[float | None] = []
        self._acts = iter(acts)
        self._loads = loads

    async def _load_what_trains(self) -> None:
        self._loads()

    def make_daemon(self, settings: Settings, dashboard: object, seen: object) -> Any:
        self.daemons.append(Acting(settings, next(self._acts)))
        return self.daemons[-1]

    async def _stay_away(self, reason: str, by_itself: bool, until_s: float | None = None) -> bool:
        self.away_for.append(reason)
        self.away_until_s.append(until_s)
        return True


EVER: dict[str, Any] = {"dashboard": "off", "on_battery": True, "on_metered": True}


async def ends(daemon: Acting) -> int:
    return 0


async def is_paused(daemon: Acting) -> int:
    async with asyncio.timeout(5):
        while daemon.pause_reason is None:
            await asyncio.sleep(0.01)
    return 0


async def looks_often(daemon: Acting) -> int:
    await asyncio.sleep(2.5 * resident_module.LOOK_EVERY_S)
    return 0


async def is_cut_off(daemon: Acting) -> int:
    raise UserError("a peer is gone", exit_code=UNREACHABLE)


def test_a_founder_that_comes_back_to_nobody_does_not_found_anew(tmp_path: Path) -> None:
    """Read again as it was started, it founded anew from the file; with `--new` it founded yet
    another run."""
    memory = memory_of(tmp_path)
    write_memory(place_of(tmp_path, memory), memory)

    async def pauses(daemon: Acting) -> int:
        daemon.run_digest = memory.run_digest
        daemon.pause("asked for")
        return 0

    settings = Settings(home=tmp_path, run="tiny", new=True, **EVER)
    resident = Staged(settings, (pauses, is_cut_off, ends))
    assert asyncio.run(resident.run()) == 0
    assert [it.settings.run for it in resident.daemons] == ["tiny", "", ""]
    assert not any(it.settings.new for it in resident.daemons[1:])
    for_ever = Staged(settings, (pauses, is_cut_off, is_cut_off))
    with pytest.raises(UserError, match="a peer is gone"):
        asyncio.run(for_ever.run())


def test_a_founder_that_is_paused_again_before_it_took_part_does_not_found_anew(
    tmp_path: Path,
) -> None:
    """The founder came back as it was started: with `--new` to a run of its own, at step 0."""
    memory = memory_of(tmp_path)
    write_memory(place_of(tmp_path, memory), memory)

    async def pauses(daemon: Acting) -> int:
        daemon.run_digest = memory.run_digest
        return await pauses_as_it_starts(daemon)

    async def pauses_as_it_starts(daemon: Acting) -> int:
        daemon.pause("asked for")
        return 0

    settings = Settings(home=tmp_path, run="tiny", new=True, **EVER)
    resident = Staged(settings, (pauses, pauses_as_it_starts, ends))
    assert asyncio.run(resident.run()) == 0
    came = [(it.settings.run, it.settings.new) for it in resident.daemons]
    assert came == [("tiny", True), ("", False), ("", False)]


async def pauses(daemon: Acting) -> int:
    daemon.pause("asked for")
    return 0


def raises(error: Exception, has_begun: bool = False) -> Callable[[Acting], Awaitable[int]]:
    async def act(daemon: Acting) -> int:
        daemon.has_begun = has_begun
        raise error

    return act


TOO_LARGE = UserError("the run is too large for this machine", "close other programs")
PASSING = [
    (TOO_LARGE, TOO_LARGE.cause),
    (OSError(errno.ENOSPC, "No space left on device", "life.json"), "a disk is full: "),
    (OSError(errno.ESTALE, "Stale file handle", "life.json"), "Stale file handle"),
]


@pytest.mark.parametrize(("error", "cause"), PASSING)
def test_what_may_pass_keeps_who_comes_back_from_a_pause_away_for_a_while(
    tmp_path: Path, error: Exception, cause: str
) -> None:
    """A game had the memory in that minute, or a disk was full. The program ended, and no service
    starts again what has ended for such a reason. Nobody watched, and nobody was told."""
    settings = Settings(home=tmp_path, run="tiny", **EVER)
    resident = Staged(settings, (pauses, raises(error), raises(error), ends))
    assert asyncio.run(resident.run()) == 0
    assert all(it.startswith("cannot take part now: ") for it in resident.away_for[1:])
    assert all(cause in reason for reason in resident.away_for[1:])
    assert len(resident.away_for) == 3 and resident.away_until_s[0] is None
    assert all(until_s and until_s > time.time() + 60 for until_s in resident.away_until_s[1:])
    assert resident.daemons[3].settings == resident.daemons[1].settings


def test_so_it_does_who_was_outside_its_hours_or_made_way_when_it_was_started(
    tmp_path: Path,
) -> None:
    settings = Settings(home=tmp_path, **AT_NIGHT)
    clock = [DAY]
    resident = Staged(settings, (raises(TOO_LARGE), ends), lambda: clock[0])
    assert asyncio.run(resident.run()) == 0
    assert resident.away_for[0] == "takes part in the hours 22:00-07:00 only"
    assert TOO_LARGE.cause in resident.away_for[1]


@pytest.mark.parametrize("error", [error for error, _ in PASSING])
def test_so_does_a_service_at_its_first_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """At log-in other programs had the memory, or the port. The service ended for good, and its
    user was told that no daemon answers."""
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    settings = Settings(home=tmp_path, run="tiny", **EVER)
    resident = Staged(settings, (raises(error), raises(LASTING)))
    with pytest.raises(UserError, match="complete"):
        asyncio.run(resident.run())
    (reason,) = resident.away_for
    assert reason.startswith("cannot take part now: "), "of what passes, and of that alone"
    assert not is_a_service({"SYSTEMD_EXEC_PID": str(os.getppid())}), "its parent is one"


LASTING = UserError("run tiny is complete", exit_code=5)


def test_a_service_whom_nobody_answers_at_its_first_start_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The inviting peer is off. systemd started the service again after half a minute, and each
    time it said that it takes part no more."""
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    resident = Told(tmp_path, (is_cut_off, is_cut_off, is_cut_off, ends))
    assert asyncio.run(resident.run()) == 0
    assert len(resident.away_for) == 3 and all(resident.away_until_s)
    assert all("cannot take part now: a peer is gone" in it for it in resident.away_for)
    assert [it.kind for it in resident.notices] == ["problem"]


@pytest.mark.parametrize(
    "acts",
    [
        (raises(TOO_LARGE),),
        (raises(PASSING[1][0]),),
        (pauses, raises(LASTING)),
        (pauses, raises(TOO_LARGE, has_begun=True)),
    ],
)
def test_a_first_start_and_what_does_not_pass_end_it(
    tmp_path: Path, acts: Sequence[Callable[[Acting], Awaitable[int]]]
) -> None:
    """A user watches, another try would come to the same, or the daemon took part by then."""
    resident = Staged(Settings(home=tmp_path, run="tiny", **EVER), acts)
    with pytest.raises((UserError, OSError)):
        asyncio.run(resident.run())
    assert len(resident.away_for) == len(acts) - 1


def test_who_pauses_while_it_comes_back_in_vain_is_paused(tmp_path: Path) -> None:
    """The pause lasts for as long as was said, and the program does not try again meanwhile."""

    async def pauses_in_vain(daemon: Acting) -> int:
        daemon.pause("asked for again")
        raise TOO_LARGE

    resident = Staged(Settings(home=tmp_path, run="tiny", **EVER), (pauses, pauses_in_vain, ends))
    assert asyncio.run(resident.run()) == 0
    assert resident.away_for == ["asked for", "asked for again"]
    assert resident.away_until_s == [None, None]


class Told(Staged):
    """A resident that keeps the notices that it sends."""

    def __init__(
        self, home: Path, acts: Sequence[Callable[[Acting], Awaitable[int]]], run: str = "tiny"
    ) -> None:
        super().__init__(Settings(home=home, run=run, **EVER), acts)
        self.notices: list[Notice] = []
        self._attention._outbox = SimpleNamespace(send=self.notices.append, close=self._close)  # type: ignore[assignment]

    async def _close(self) -> None:
        """Nothing waits to be sent."""


def test_that_it_cannot_take_part_is_told_once(tmp_path: Path) -> None:
    in_vain = raises(TOO_LARGE)
    resident = Told(tmp_path, (pauses, in_vain, in_vain, pauses, in_vain, ends))
    assert asyncio.run(resident.run()) == 0
    assert [(it.kind, TOO_LARGE.cause in it.text) for it in resident.notices] == [
        ("problem", True)
    ] * 2


@pytest.mark.parametrize(
    ("error", "is_bug"),
    [(PASSING[1][0], False), (OSError(errno.EINVAL, "x"), True), (ValueError("x"), True)],
)
def test_a_full_disk_is_no_bug_to_who_asked_to_be_told(
    tmp_path: Path, error: Exception, is_bug: bool
) -> None:
    """The terminal said that the disk is full, and the webhook that this program has a bug."""
    resident = Told(tmp_path, (raises(error),))
    with pytest.raises(type(error)):
        asyncio.run(resident.run())
    (notice,) = resident.notices
    assert ("bug" in notice.text) is is_bug
    assert is_bug or "a disk is full" in notice.text


class Homeless(Told):
    """A resident that loads and stays away as the real one does."""

    _load_what_trains = Resident._load_what_trains
    _stay_away = Resident._stay_away


@pytest.fixture
def tries_often(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A service that has something to load."""
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    monkeypatch.setattr(returning, "TRY_AGAIN_S", 0.02)
    (tmp_path / "loads_at_once.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(resident_module, "_TRAINS", "loads_at_once")
    monkeypatch.delitem(sys.modules, "loads_at_once", raising=False)


def has_no_disk(home: Path) -> None:
    if home.parent.is_dir():
        home.parent.rename(home.parent.with_name("gone"))
    home.parent.write_bytes(b"")


@pytest.mark.parametrize("run", ["tiny", ""])
def test_a_service_whose_home_cannot_be_used_says_so_once_and_waits_for_it(
    tmp_path: Path, tries_often: None, run: str
) -> None:
    """The service ended, and systemd started it again after half a minute. Each time its owner was
    told, on the screen and by webhook, that it takes part no more."""
    home = tmp_path / "disk" / "home"
    memory = memory_of(tmp_path)

    async def waits() -> None:
        has_no_disk(home)
        resident = Homeless(home, (ends,), run)
        running = asyncio.create_task(resident.run())
        await asyncio.sleep(0.3)
        assert not running.done()
        ((kind, text),) = [(it.kind, it.text) for it in resident.notices]
        assert kind == "problem" and text.startswith("cannot take part now: "), text
        home.parent.unlink()
        write_memory(place_of(home, memory), memory)
        assert await asyncio.wait_for(running, 20) == 0
        assert len(resident.daemons) == len(resident.notices) == 1

    asyncio.run(waits())


def test_a_service_makes_no_home_where_its_disk_was_taken_away(
    tmp_path: Path, tries_often: None
) -> None:
    """The service waited for its disk, which its owner had unmounted to look at. The mount point
    was an empty directory."""
    home = tmp_path / "disk" / "home"

    async def waits() -> None:
        home.mkdir(parents=True)
        resident = Homeless(home, (ends,), "tiny")
        running = asyncio.create_task(resident.run())
        await asyncio.sleep(0.3)
        assert not running.done() and not list(home.iterdir())
        (home / "runs").mkdir()
        assert await asyncio.wait_for(running, 20) == 0

    asyncio.run(waits())


@pytest.mark.parametrize("has_paused", [True, False])
def test_who_waits_for_its_home_obeys_signals(
    tmp_path: Path, tries_often: None, has_paused: bool
) -> None:
    home = tmp_path / "disk" / "home"

    async def is_told() -> None:
        async def pauses_without_disk(daemon: Acting) -> int:
            has_no_disk(home)
            return await pauses(daemon)

        (home / "runs").mkdir(parents=True)
        resident = Homeless(home, (pauses_without_disk,))
        if not has_paused:
            has_no_disk(home)
        running = asyncio.create_task(resident.run())
        while not resident.notices:
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 20) == 0
        assert [it.kind for it in resident.notices] == ["problem"]
        assert len(resident.daemons) == has_paused

    asyncio.run(is_told())


NIGHT, DAY = datetime(2026, 3, 1, 23, 30), datetime(2026, 3, 2, 8, 0)
AT_NIGHT: dict[str, Any] = {"hours": "22-07", "run": "tiny", **EVER}


def test_hours_that_end_while_the_program_loads_are_over(tmp_path: Path) -> None:
    """The clock was put right then, or it was the last half minute of the hours. The daemon took
    itself for resumed outside of its hours, and took part all day."""
    clock = [NIGHT]

    def load() -> None:
        clock[0] = DAY

    settings = Settings(home=tmp_path, **AT_NIGHT)
    resident = Staged(settings, (is_paused, ends), lambda: clock[0], load)
    assert asyncio.run(resident.run()) == 0
    assert resident.away_for == ["takes part in the hours 22:00-07:00 only"]


@pytest.mark.parametrize(
    ("began", "by_itself", "is_over"),
    [(NIGHT, True, True), (NIGHT, False, True), (DAY, False, False)],
)
def test_who_comes_back_within_its_hours_leaves_if_they_end_while_it_loads(
    tmp_path: Path, began: datetime, by_itself: bool, is_over: bool
) -> None:
    """A daemon that was resumed outside of its hours takes part until they end next, as before."""
    clock = [began]
    resident = Resident(Settings(home=tmp_path / "home", **AT_NIGHT), lambda: clock[0])

    async def comes_back() -> None:
        staying = asyncio.create_task(resident._stay_away("for a test", by_itself))
        while not by_itself and not Home(tmp_path / "home").socket.exists():
            await asyncio.sleep(0.01)
        if not by_itself:
            await asyncio.to_thread(call_daemon, tmp_path / "home", "resume", "POST")
        assert await asyncio.wait_for(staying, 20)
        clock[0] = DAY
        daemon = Acting(resident._settings, is_paused if is_over else looks_often)
        assert await resident._take_part_within_hours(daemon, None) == 0  # type: ignore[arg-type]
        assert (daemon.pause_reason is not None) is is_over

    asyncio.run(comes_back())


class Loading(Staged):
    """A resident that stays away as the real one does, and loads for as long as the scene says."""

    _stay_away = Resident._stay_away

    def __init__(self, home: Path, acts: Sequence[Callable[[Acting], Awaitable[int]]]) -> None:
        settings = Settings(home=home, **{**AT_NIGHT, "dashboard": "auto"})
        super().__init__(settings, acts, lambda: DAY)
        self.is_loading, self.has_loaded = asyncio.Event(), asyncio.Event()

    async def _load_what_trains(self) -> None:
        self.is_loading.set()
        await self.has_loaded.wait()

    def make_daemon(self, settings: Settings, dashboard: object, seen: object) -> Any:
        daemon = super().make_daemon(settings, dashboard, seen)
        daemon.leave = lambda: daemon.pause("told to leave")
        return daemon

    async def resumes(self) -> None:
        """Returns once the program loads."""
        while not Home(self._settings.home).socket.exists():
            await asyncio.sleep(0.01)
        await self.press("resume")
        await asyncio.wait_for(self.is_loading.wait(), 20)

    @property
    def buttons(self) -> set[str]:
        return set(self._dashboard._actions)

    async def press(self, name: str) -> None:
        await self._dashboard._actions[name]()


async def by_signal(resident: Loading) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def by_button(resident: Loading) -> None:
    await resident.press("leave")


@pytest.mark.parametrize("tell", [by_button, by_signal])
def test_who_is_told_to_leave_while_it_loads_what_trains_leaves(
    tmp_path: Path, tell: Callable[[Loading], Awaitable[None]]
) -> None:
    """Hours began, or its user resumed. Its page said that it is paused, and offered to resume. It
    forgot each order, and joined the others."""

    async def is_told() -> None:
        resident = Loading(tmp_path / "home", ())
        running = asyncio.create_task(resident.run())
        await resident.resumes()
        shown = resident.state().live
        assert (shown.state, shown.reason, shown.next) == ("starting", "loads the program", ())
        assert resident.buttons == {"leave"}
        await tell(resident)
        await asyncio.sleep(0.1)
        resident.has_loaded.set()
        assert await asyncio.wait_for(running, 20) == 0
        assert not resident.daemons

    asyncio.run(is_told())


def test_who_is_told_to_leave_before_its_daemon_listens_leaves(tmp_path: Path) -> None:
    """Until then the page's button and the signals are those of the time away."""

    async def is_told() -> None:
        resident = Loading(tmp_path / "home", (is_paused,))
        running = asyncio.create_task(resident.run())
        await resident.resumes()
        resident.has_loaded.set()
        while not resident.daemons:
            await asyncio.sleep(0.01)
        await resident.press("leave")
        while resident.daemons[0].pause_reason is None:
            await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait({running})

    asyncio.run(asyncio.wait_for(is_told(), 20))


def test_a_pause_is_kept_though_others_were_lost_while_it_left(tmp_path: Path) -> None:
    """A member had died in that moment. The daemon joined anew at once, and the pause was
    forgotten."""

    async def is_cut_off_for_a_pause(daemon: Acting) -> int:
        daemon.pause("asked for")
        return await is_cut_off(daemon)

    async def pauses(daemon: Acting) -> int:
        daemon.pause("for a test")
        daemon.run_digest = "ab" * 32
        return 0

    acts = (pauses, is_cut_off_for_a_pause, ends)
    resident = Staged(Settings(home=tmp_path, run="tiny", **EVER), acts)
    assert asyncio.run(resident.run()) == 0
    assert resident.away_for == ["for a test", "asked for"]
    first = Staged(Settings(home=tmp_path, run="tiny", **EVER), acts[1:])
    assert asyncio.run(first.run()) == 0 and first.away_for == ["asked for"]


def away_in(home: Path, status: dict[str, Any]) -> Away:
    """What a process of a laboratory has left behind, after it took a step back."""
    live = Live(0.0, "1", "a", "paused", "asked for", 0.0, committed_here=7, undone_here=2)
    shown = DashboardState(msgspec.structs.replace(live, marks=("shaped links: x",)))
    settings = as_plain(Settings(home=home, dashboard="off"))
    return Away(settings, settings, "asked for", False, status, shown, None)


def while_paused(home: Path, away: Away, look: Callable[[Resident], Awaitable[None]]) -> None:
    (home / "runs").mkdir()

    async def scene() -> None:
        resident = Resident(Settings.model_validate(away.settings), away=away)
        staying = asyncio.create_task(resident._wait_to_begin())
        while not Home(home).socket.exists():
            assert not staying.done()
            await asyncio.sleep(0.01)
        await look(resident)
        await asyncio.to_thread(call_daemon, home, "leave", "POST")
        assert await asyncio.wait_for(staying, 20) is None

    asyncio.run(scene())


def test_who_was_upgraded_while_it_was_paused_begins_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The resumed daemon loaded the rest of the new version into the process of the old one."""
    program = tmp_path / "__init__.py"
    program.write_text("old")
    monkeypatch.setattr(away_module, "_stamp", partial(away_module._stamp, program))
    monkeypatch.setattr(away_module, "_BEGUN_AS", away_module._stamp())
    left = away_in(tmp_path, {})

    class Paused(Resident):
        async def _stay_away(self, *_: Any) -> bool:
            return True

        async def _load_what_trains(self) -> None:
            raise Loads

    class Loads(Exception):
        pass

    def comes_back() -> None:
        settings = Settings.model_validate(left.settings)
        asyncio.run(Paused(settings, steps_aside=True, away=left).run())

    with pytest.raises(Loads):
        comes_back()
    program.unlink()
    with pytest.raises(Loads):
        comes_back()
    program.write_text("newer")
    with pytest.raises(StepAside) as aside:
        comes_back()
    assert (aside.value.away.until_s, aside.value.away.come_back) == (RESUMED_S, left.come_back)


def test_a_pause_outlives_an_upgrade(tmp_path: Path) -> None:
    """By then the shown state may be written otherwise, and a setting may no longer exist."""
    left = msgspec.json.decode(msgspec.json.encode(away_in(tmp_path, {})))
    left["shown"] = {"live": "another"}
    left["settings"]["gone"], left["until_s"] = 1, 9e9
    file = tmp_path / "away"
    file.write_bytes(msgspec.json.encode(left))
    found = received(os.open(file, os.O_RDONLY))
    assert (found.reason, found.by_itself, found.until_s) == ("asked for", False, 9e9)
    assert Settings.model_validate(found.settings).home == tmp_path
    assert found.come_back == left["come_back"] and found.shown.live.reason == "asked for"


def test_a_pause_keeps_what_makes_figures_those_of_a_laboratory(tmp_path: Path) -> None:
    """The page showed the curves of a laboratory run without saying so. Prometheus's counters fell,
    and rose again after the pause."""

    async def look(resident: Resident) -> None:
        live = resident.state().live
        assert (live.marks, live.committed_here, live.undone_here) == (("shaped links: x",), 7, 2)

    while_paused(tmp_path, away_in(tmp_path, {}), look)


def test_who_is_paused_tells_of_no_view(tmp_path: Path) -> None:
    """A lone founder, whose view did not end with its leave, said that it is in a view."""
    before = {
        "view": 3, "agreement": {"phase": "in a view", "reason": "view 3 is in force"},
        "weak_points": {"peers": ["a"], "links": []}, "tensors_over": {"a": {"forward": 2}},
        "waits": [{"owner": "the step loop"}], "run": "tiny", "barred": [],
    }  # fmt: skip

    async def look(resident: Resident) -> None:
        told = await asyncio.to_thread(call_daemon, tmp_path, "status")
        assert (told["state"], told["run"]) == ("paused", "tiny")
        assert not any(told[name] for name in before if name != "run")

    while_paused(tmp_path, away_in(tmp_path, before), look)
