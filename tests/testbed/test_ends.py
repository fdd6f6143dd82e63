"""Peers that end by themselves, with whatever code, before the last step and without an order
to."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.growing_history import GrowingHistory
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.watching.endings import Endings
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.testbed.watched_swarm import WatchedSwarm

STEPS = 16


def ended(outcome: int | BaseException) -> Any:
    """A task with this outcome, which has been taken."""
    future: asyncio.Future[int] = asyncio.Future(loop=asyncio.new_event_loop())
    if isinstance(outcome, int):
        future.set_result(outcome)
    else:
        future.set_exception(outcome)
        future.exception()
    future.get_loop().close()
    return future


def peer(name: str, *steps: tuple[float, int], **more: Any) -> Any:
    told = [{"event": "step", "step": step, "at_s": at_s, "loss": 1.0} for at_s, step in steps]
    values = {"ended": None, "was_killed": False, "is_told_to_leave": False}
    return SimpleNamespace(name=name, events=lambda: told, **(values | more))


def seen(one: Any, *others: Any, now_s: float = 20.0) -> str:
    return Endings(lambda: [one], [one, *others], STEPS).look(now_s)


@pytest.mark.parametrize("outcome", [0, RunComplete("run", STEPS)])
def test_nobody_ends_by_itself_before_the_last_step(outcome: Any) -> None:
    before, after = peer("b", (10.0, STEPS - 2)), peer("b", (10.0, STEPS - 2), (19.0, STEPS - 1))
    assert "a ended by itself before the last step" in seen(peer("a", ended=ended(outcome)), before)
    assert not seen(peer("a", ended=ended(outcome)), after), "the run is complete"
    later = peer("b", (21.0, STEPS - 1))
    assert seen(peer("a", ended=ended(outcome)), later, now_s=20.0), "it was not, by then"
    assert not seen(peer("a", ended=ended(outcome), is_told_to_leave=True), before)
    assert not seen(peer("a", ended=ended(outcome), was_killed=True), before)
    assert not seen(peer("a"), before)


def test_another_code_is_wrong_at_any_time() -> None:
    last = (10.0, STEPS - 1)
    assert "a ended with code 3" in seen(peer("a", last, ended=ended(3)))
    assert not seen(peer("a", ended=ended(ValueError()))), "that is judged in the end"


def test_who_is_told_to_leave_is_told_so_until_it_starts_again(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> None:
        one = swarm.peer("a", run=str(make_run(tmp_path, STEPS)))
        endings = Endings(lambda: swarm.peers, swarm.peers, STEPS)
        swarm.start(one)
        await swarm.until(lambda: one.told_step() >= 2, "steps", 60)
        assert one.daemon is not None
        swarm.leave(one)
        await swarm.until(lambda: not one.is_running, "it leaves", 60)
        assert one.is_told_to_leave and not endings.look(swarm.now_s)
        swarm.start(one)
        await swarm.until(lambda: one.told_step() >= 3, "steps", 60)
        one.daemon.leave()
        await swarm.until(lambda: not one.is_running, "it ends by itself", 60)
        assert one.told_step() < STEPS and endings.look(swarm.now_s).startswith("a ended by itself")

    play(1, tmp_path / "world", scene)


class EndedProcess:
    """One that has ended with code 0."""

    pid = 1

    def poll(self) -> int:
        return 0


def test_a_real_daemon_that_ends_with_code_0_has_a_reason(tmp_path: Path) -> None:
    swarm, told = LocalSwarm(tmp_path), list[int]()
    (tmp_path / "stderr").write_text("left the swarm")
    process: Any = EndedProcess()
    process.send_signal = told.append
    swarm.children.append(Child("peer-0", tmp_path, process))
    watched = WatchedSwarm(swarm, {"id-0": "peer-0"}, STEPS)
    (wrong,) = watched.wrong_ends()
    assert wrong.startswith("peer-0 ended by itself before the last step: left the swarm")
    watched.tell_to_leave("peer-0")
    assert told and not watched.wrong_ends()
    others = WatchedSwarm(swarm, {"id-0": "peer-0"}, STEPS)
    history: GrowingHistory = others.history("peer-0")
    history.step = STEPS - 2
    assert others.wrong_ends()
    history.step = STEPS - 1
    assert not others.wrong_ends()
