"""What ends a daemon is told to its user as what it is: a gone peer, or a bug."""

import asyncio
import contextlib
import contextvars
import errno
import json
import os
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2p_dtfm.core.liveness.pace import FETCH_BYTES_PER_S
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import LIFE_LIMIT
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.home import BESIDE_FILE, Home
from p2p_dtfm.daemon.machine.life import Life
from p2p_dtfm.daemon.node.coming_and_going import departure
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.daemon import _until_end, cause_of_end
from p2p_dtfm.daemon.node.network import _until_lost
from p2p_dtfm.daemon.node.participation import end_of_run
from p2p_dtfm.daemon.node.participation.end_of_run import EndOfRun
from p2p_dtfm.daemon.telemetry import event_log
from p2p_dtfm.daemon.telemetry.event_log import EventLog
from p2p_dtfm.daemon.telemetry.status import Troubles
from p2p_dtfm.net.errors import P2PD_HAS_ENDED, Refused, Unreachable
from p2p_dtfm.ports import disk, now
from tests.core.planning import name_of
from tests.daemon.trainer_parts import view_of

SECOND_NS = 1_000_000_000
MODEL_BYTES = 100_000_000


def test_gone_peers_are_no_bug() -> None:
    inner = ExceptionGroup("sends", [Unreachable("x", "stream reset"), Refused("no", "y")])
    error = cause_of_end(ExceptionGroup("step", [inner, Unreachable("x", "stream reset")]))
    assert isinstance(error, UserError) and error.exit_code == 6
    assert error.cause.count("stream reset") == 1 and "y: no" in error.cause
    assert "--initial-peers" in error.fixes[0] and "--invite" in error.fixes[0]


def test_a_bug_among_them_stays_a_bug() -> None:
    group = ExceptionGroup("step", [Unreachable("x", "gone"), ValueError("ours")])
    assert cause_of_end(group) is group
    assert isinstance(cause_of_end(AssertionError("ours")), AssertionError)


def test_who_has_lost_its_p2pd_is_told_so_also_before_it_takes_part() -> None:
    """The daemon ended with a traceback, or looked for members with a host that was gone."""
    error = cause_of_end(Unreachable("me", P2PD_HAS_ENDED))
    assert isinstance(error, UserError) and "has ended by itself" in error.cause

    async def looks_for_members() -> None:
        life, host = Life(lambda: None), SimpleNamespace(lost=asyncio.Event())
        life.spawn(_until_lost(host))  # type: ignore[arg-type]
        looking = asyncio.create_task(life.unless_leaving(asyncio.sleep(3600.0)))
        await asyncio.sleep(0.01)
        assert not looking.done()
        host.lost.set()
        await asyncio.wait_for(looking, 20.0)

    with pytest.raises(UserError, match="has ended by itself"):
        asyncio.run(looks_for_members())


def test_what_goes_wrong_after_the_last_step_is_no_good_end() -> None:
    """Nobody looked at the failed task, and the daemon ended with 0."""

    async def run_ended() -> None:
        raise ValueError("ours")

    async def to_the_end() -> int:
        participant = SimpleNamespace(
            local=SimpleNamespace(life=Life(lambda: None)),
            network=SimpleNamespace(host=SimpleNamespace(lost=asyncio.Event())),
            trainer=SimpleNamespace(done=asyncio.Event()),
        )
        departure = SimpleNamespace(participant=participant, run_ended=run_ended)
        return await _until_end(departure)  # type: ignore[arg-type]

    with pytest.raises(ValueError, match="ours"):
        asyncio.run(to_the_end())


SAVE_AGAIN_S = 0.02


async def wait_for_real(duration_s: float) -> None:
    """Wait by the machine's clock, as a timeout does."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(duration_s):
            await asyncio.Event().wait()


class Complete:
    """The part of a daemon that stays after its run's last step. `whole` is what it and all others
    have."""

    def __init__(self, exit_when_done: bool) -> None:
        self.whole = False
        self.told: list[int] = []
        self.trainer = SimpleNamespace(done=asyncio.Event(), states={})
        self.blobs = SimpleNamespace(received_bytes=0, given_bytes=Counter[str]())
        self.membership = SimpleNamespace(
            agreement=SimpleNamespace(view=view_of(1, 2)),
            me=SimpleNamespace(peer_id="me"),
            run=SimpleNamespace(spec=SimpleNamespace(total_steps=40)),
            workload=SimpleNamespace(
                layer_count=1, cost=lambda layer: SimpleNamespace(state_bytes=MODEL_BYTES)
            ),
        )
        checkpoints = SimpleNamespace(
            whole_at=lambda step, members: self.whole,
            whole_step=40,
            refused=lambda step: False,
            saved=(),
            tell=self.told.append,
        )
        self.life = Life(lambda: None)
        self.participant = SimpleNamespace(
            membership=self.membership,
            trainer=self.trainer,
            checkpoints=checkpoints,
            network=SimpleNamespace(blobs=self.blobs),
            local=SimpleNamespace(
                life=self.life, settings=SimpleNamespace(exit_when_done=exit_when_done)
            ),
        )

    def ends(self) -> asyncio.Task[None]:
        return asyncio.create_task(Departure(self.participant).run_ended())  # type: ignore[arg-type]


def in_quick_time(scene: Callable[[Callable[[float], Awaitable[None]]], Awaitable[None]]) -> None:
    """Play a scene, `scene(passes)`: a sleep takes a turn of the loop, and moves the clock on.
    `passes(s)` lets others sleep for so long."""
    clock, sleep = SetClock(100 * SECOND_NS), asyncio.sleep

    async def quick_sleep(duration_s: float) -> None:
        clock.at_ns += round(duration_s * SECOND_NS)
        await sleep(0)

    async def passes(duration_s: float) -> None:
        end_ns, before_ns = clock.at_ns + round(duration_s * SECOND_NS), -1
        while before_ns < clock.at_ns < end_ns:  # or all wait for something else
            before_ns = clock.at_ns
            for _ in range(10):
                await sleep(0)

    async def played() -> None:
        now.live_by(clock)
        await scene(passes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asyncio, "sleep", quick_sleep)
        contextvars.copy_context().run(asyncio.run, played())


@pytest.mark.parametrize("exit_when_done", [True, False], ids=["exits", "stays"])
def test_nobody_ends_while_its_last_steps_are_computed_again(exit_when_done: bool) -> None:
    """A crash had cost the last steps. A minute later all others had ended, with 0 and without the
    model. A member that was told to leave only later did not hand over what it held."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done)
        peer.trainer.done.set()
        ends = peer.ends()
        await passes(10.0)
        peer.trainer.done.clear()
        peer.life.leaving.set()
        await passes(200.0)
        assert not ends.done()
        peer.trainer.done.set()
        peer.whole = True
        await passes(1.0)
        assert ends.done()

    in_quick_time(scene)


@pytest.mark.parametrize("is_lost_while", ["shares", "stays"])
def test_what_is_computed_again_is_shared_again(is_lost_while: str) -> None:
    """A member that stays had shared already, and the layers of the dead member were on no disk
    (seed 800251)."""
    saved = list[int]()

    async def save(step: int, states: dict[int, object], lineage: str) -> None:
        saved.append(step)

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=False)
        peer.participant.lineage_at = lambda step: "lineage"
        peer.participant.checkpoints.save = save
        peer.whole = is_lost_while == "stays"
        peer.trainer.done.set()
        ends = peer.ends()
        await passes(1.0)
        peer.whole = False
        peer.trainer.done.clear()
        if is_lost_while == "stays":
            await wait_for_real(3 * SAVE_AGAIN_S)
        await passes(5.0)
        assert not saved
        peer.trainer.states[0] = SimpleNamespace(version=40)
        peer.trainer.done.set()
        await passes(10.0)
        assert saved and set(saved) == {40}
        ends.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departure, "SAVE_AGAIN_S", SAVE_AGAIN_S)
        in_quick_time(scene)


@pytest.mark.parametrize("leaves", [False, True], ids=["stays", "leaves"])
def test_a_last_step_that_a_full_disk_refused_is_saved_when_its_user_has_made_room(
    leaves: bool,
) -> None:
    """A minute after the end it was not tried again. The status asked for room, and who made it had
    no model, until the daemon left; where there were other members, not even then."""
    has_room, saved = asyncio.Event(), list[int]()

    async def save(step: int, states: dict[int, object], lineage: str) -> None:
        if has_room.is_set():
            saved.append(step)

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=False)
        checkpoints = peer.participant.checkpoints
        peer.participant.lineage_at = lambda step: "lineage"
        checkpoints.save, checkpoints.refused = save, lambda step: not saved
        peer.trainer.states[0] = SimpleNamespace(version=40)
        peer.trainer.done.set()
        ends = peer.ends()
        await passes(2 * departure.DONE_WAIT_S)
        assert not saved
        has_room.set()
        if leaves:
            peer.life.leaving.set()
            await asyncio.wait_for(ends, 20.0)
        else:
            await asyncio.sleep(60.0)
            await wait_for_real(3 * SAVE_AGAIN_S)
        assert saved == [40]
        ends.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(departure, "SAVE_AGAIN_S", SAVE_AGAIN_S)
        in_quick_time(scene)


def test_a_run_whose_last_steps_are_computed_again_is_told_complete_once_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The report was written while the steps were computed again, and nothing was said in the
    end."""
    told: list[int] = []
    monkeypatch.setattr(end_of_run, "write_report", lambda *of: True)
    monkeypatch.setattr(end_of_run, "last_words", lambda *of: told.append(1) or ())
    spec = SimpleNamespace(total_steps=40, layers=("listed",))
    home = SimpleNamespace(run_directory=lambda digest: Path("run"))
    observer = SimpleNamespace(state=lambda: None, ends_with=lambda commands: None)

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        done = asyncio.Event()
        checkpoints: Any = SimpleNamespace(
            whole_step=None,
            withheld=frozenset(),
            refused=lambda step: False,
            has_no_room=lambda step: False,
        )
        run: Any = SimpleNamespace(spec=spec, digest="ab")
        local: Any = SimpleNamespace(home=home, observer=observer)
        done.set()
        telling = asyncio.create_task(EndOfRun(local, run, done, checkpoints, None).when_done())
        await passes(1.0)
        done.clear()
        await passes(100.0)
        assert not told and not telling.done()
        checkpoints.whole_step = 40
        done.set()
        await asyncio.wait_for(telling, 20.0)

    in_quick_time(scene)
    assert told == [1]


def test_who_ends_with_its_run_waits_for_those_that_still_fetch_the_model() -> None:
    """All members ended a minute after the last step. Nobody had a model whole that travels longer
    than that."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=True)
        peer.trainer.done.set()
        ends = peer.ends()
        for _ in range(10):
            await passes(30.0)
            peer.blobs.received_bytes += 1
            await passes(30.0)
            peer.blobs.given_bytes[name_of(1)] += 1
            assert not ends.done()
        peer.whole = True
        await passes(1.0)
        assert ends.done()

    in_quick_time(scene)


def test_who_shares_the_model_tells_again_what_it_has_of_it() -> None:
    """A member that was cut off during that word asked nobody for what it lacked."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=True)
        peer.trainer.done.set()
        ends = peer.ends()
        await passes(45.0)
        assert peer.told == [40] * 2
        peer.whole = True
        await passes(30.0)
        assert ends.done() and len(peer.told) == 2

    in_quick_time(scene)


def test_who_ends_with_its_run_waits_for_nobody_for_ever() -> None:
    """Another peer asks for its files again and again."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=True)
        peer.trainer.done.set()
        ends = peer.ends()
        for _ in range(4 * MODEL_BYTES // FETCH_BYTES_PER_S // 30):
            await passes(30.0)
            peer.blobs.given_bytes[name_of(1)] += 1
        assert ends.done()

    in_quick_time(scene)


def test_who_is_told_to_leave_before_the_last_step_shares_no_longer_than_who_is_told_after() -> (
    None
):
    """The step committed before a view without the leaver took over. It stayed until all others had
    the whole model, even on battery."""

    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=False)
        peer.life.leaving.set()
        ends = peer.ends()
        await passes(5.0)
        peer.trainer.done.set()
        await passes(2.0)
        assert ends.done()

    in_quick_time(scene)


def test_strangers_that_fetch_keep_nobody_after_the_end() -> None:
    async def scene(passes: Callable[[float], Awaitable[None]]) -> None:
        peer = Complete(exit_when_done=True)
        peer.trainer.done.set()
        ends = peer.ends()
        for _ in range(3):
            await passes(30.0)
            peer.blobs.given_bytes["a stranger"] += 1
        assert ends.done()

    in_quick_time(scene)


def test_a_closed_terminal_has_it_leave_in_order_and_nohup_outlives_it() -> None:
    """The shell and the kernel both send a hang-up: two of them do not count as a second Ctrl-C."""

    async def leaves() -> bool:
        life = Life(lambda: None)
        life.handle_signals(until_stdin_closes=False)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.05)
        return life.leaving.is_set()

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert not asyncio.run(leaves())
        signal.signal(signal.SIGHUP, lambda *_: None)
        assert asyncio.run(leaves())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_home_one_daemon(tmp_path: Path) -> None:
    first, second = Home(tmp_path), Home(tmp_path)
    first.acquire()
    with pytest.raises(UserError, match="already running") as caught:
        second.acquire()
    assert caught.value.exit_code == 3
    first.release()
    second.acquire()
    second.release()


def test_a_full_disk_keeps_nobody_out_of_its_own_home(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon that came back from a pause to a full disk ended. The number in the lock is for
    messages alone."""

    home = Home(tmp_path)
    home.acquire()
    home.release()

    def write(descriptor: int, payload: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(os, "write", write)
        home.acquire()
    assert "does not say whose it is: No space left" in caplog.text
    home.release()


def test_lives_grow_even_if_the_clock_goes_back_or_the_file_is_rubbish(tmp_path: Path) -> None:
    home = Home(tmp_path)
    first = home.next_life()
    assert home.next_life() > first
    (tmp_path / "life.json").write_text(json.dumps({"life": first + 10**9}))
    assert home.next_life() == first + 10**9 + 1
    for rubbish in (b"\xff{", b'{"life": Infinity}', b"[" * 100_000, b'{"life": 1e300}'):
        (tmp_path / "life.json").write_bytes(rubbish)
        assert first <= home.next_life() < LIFE_LIMIT, "nobody would know a peer of a longer one"


def test_what_is_said_to_stand_beside_a_home_may_be_rubbish(tmp_path: Path) -> None:
    for rubbish in (b"\xff{", b"[" * 100_000, b"1"):
        (tmp_path / BESIDE_FILE).write_bytes(rubbish)
        assert Home(tmp_path).of_this_machine() == ()


def test_the_event_log_keeps_a_bounded_history(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_log, "LIMIT_BYTES", 1000)
    path = tmp_path / "events.jsonl"
    log = EventLog(path)
    for step in range(200):
        log.write("step", step=step)
    lines = path.read_text().splitlines()
    assert json.loads(lines[-1])["step"] == 199
    kept = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert kept < 2 * 1000 + 200


def test_the_history_changes_its_name_on_the_disk_that_the_daemon_lives_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that writes no names any more was passed by, so no world could refuse them."""
    monkeypatch.setattr(event_log, "LIMIT_BYTES", 10)
    log, troubles = disk.MachineDisk(), Troubles()

    def refuse(temporary: Path, path: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    def scenario() -> None:
        monkeypatch.setattr(log, "name", refuse)
        disk.live_by(log)
        events = EventLog(tmp_path / "events.jsonl", troubles)
        events.write("step", step=1)
        events.write("step", step=2)

    contextvars.copy_context().run(scenario)
    assert [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
    assert [name for name, _, _ in troubles.named()] == ["history"]


def test_a_disk_that_refuses_costs_the_line_only(tmp_path: Path) -> None:
    EventLog(tmp_path / "missing" / "events.jsonl").write("step", step=1)


class SetClock:
    """A clock that stands where it is put."""

    def __init__(self, at_ns: int) -> None:
        self.at_ns = at_ns

    def monotonic_ns(self) -> int:
        return self.at_ns

    def wall_ns(self) -> int:
        return self.at_ns

    def awake_or_asleep_ns(self) -> int:
        return self.at_ns

    def block_ns(self, duration_ns: int) -> None:
        self.at_ns += duration_ns


def leaver(view: View) -> Departure:
    """The part of a daemon that decides when to leave at last."""
    participant = SimpleNamespace(
        membership=SimpleNamespace(agreement=SimpleNamespace(view=view)),
        local=SimpleNamespace(life=Life(lambda: None)),
        trainer=SimpleNamespace(
            leave_views=lambda: None, waits=SimpleNamespace(stands_still=False)
        ),
    )
    return Departure(participant)  # type: ignore[arg-type]


def test_who_has_the_only_copy_waits_for_a_while_before_it_leaves() -> None:
    """Without a plan no step is made in which anybody could take its layers over."""
    clock = SetClock(100 * SECOND_NS)
    contextvars.copy_context().run(_who_has_the_only_copy_waits, clock)


def _who_has_the_only_copy_waits(clock: SetClock) -> None:
    now.live_by(clock)
    trains = view_of(1, 2)
    stuck = View(trains.snapshot, NoPlan("too little memory"))
    peer = leaver(stuck)
    life, agreement = peer.participant.local.life, peer.participant.membership.agreement

    def left_after(seconds: float) -> bool:
        clock.at_ns += int(seconds * SECOND_NS)
        peer.leave_at_last()
        return life.left.is_set()

    assert not left_after(0) and not left_after(1000), "nobody asked it to leave"
    life.leaving.set()
    assert not left_after(0) and not left_after(departure.LEAVE_LIMIT_S - 1)
    agreement.view = trains
    assert not left_after(10), "somebody came, and takes the layers over"
    agreement.view = stuck
    assert not left_after(10)
    agreement.view = None  # it has gone over to those that want for what it has
    assert not left_after(10) and left_after(departure.LEAVE_LIMIT_S + 1)


def test_who_cannot_end_its_step_waits_for_a_while_before_it_leaves() -> None:
    """The run has diverged, or nobody gives its data, so no step commits with which others take
    over its layers. The member was leaving for ever, also at the end of its hours."""
    clock = SetClock(100 * SECOND_NS)
    contextvars.copy_context().run(_who_cannot_end_its_step_waits, clock)


def _who_cannot_end_its_step_waits(clock: SetClock) -> None:
    now.live_by(clock)
    peer = leaver(view_of(1, 2))
    life, waits = peer.participant.local.life, cast(Any, peer.participant.trainer.waits)

    def left_after(seconds: float) -> bool:
        clock.at_ns += int(seconds * SECOND_NS)
        peer.leave_at_last()
        return life.left.is_set()

    life.leaving.set()
    assert not left_after(0) and not left_after(1000), "steps commit"
    waits.stands_still = True
    assert not left_after(0) and not left_after(departure.LEAVE_LIMIT_S - 1)
    waits.stands_still = False
    assert not left_after(10), "the data came"
    waits.stands_still = True
    assert not left_after(10) and left_after(departure.LEAVE_LIMIT_S + 1)
