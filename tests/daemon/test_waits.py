"""Who awaits what, for how long, and why: as a daemon tells it of its own tasks."""

import asyncio
import inspect
import pkgutil
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.dashboard.waits import (
    LIMIT_S,
    WAITS_FOR_WORK,
    WAITS_OF_A_MACHINE,
    OwnWaits,
    TaskWaits,
    Wait,
)
from p2p_dtfm.daemon.node.action_loop import ActionLoop
from p2p_dtfm.daemon.telemetry.problems import Sight, problems_in
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.nat.until_one_ends import until_one_ends
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play


def told_after(tmp_path: Path, seconds: int, *work: Coroutine[Any, Any, Any]) -> list[Wait]:
    """The waits of tasks that do `work`, looked at each second of virtual time."""

    async def scene(swarm: Swarm) -> list[Wait]:
        tasks, waits = [asyncio.create_task(each) for each in work], TaskWaits()
        waits.look(tasks, 0.0)
        for _ in range(seconds):
            await asyncio.sleep(1)
            waits.look(tasks, 1.0)
        return waits.told()

    return play(0, tmp_path, scene)


def unsettled() -> Coroutine[Any, Any, None]:
    """Nobody does what was put off."""
    loop = ActionLoop()
    loop.handle({str: lambda text: None})
    loop.later(["put off"])  # type: ignore[list-item]
    return loop.settled()


def test_a_wait_is_told_by_owner_place_and_age_and_is_overdue_after_its_bound(
    tmp_path: Path,
) -> None:
    (early,) = told_after(tmp_path, 50, unsettled())
    assert early.owner == early.place == "node.action_loop.ActionLoop.settled"
    assert early.waited_s == pytest.approx(50, abs=1.5) and not early.is_overdue
    (late,) = told_after(tmp_path, 70, unsettled())
    assert late.limit_s == LIMIT_S and late.is_overdue


def test_who_waits_for_work_says_for_what_and_is_never_overdue(tmp_path: Path) -> None:
    (idle,) = told_after(tmp_path, 200, ActionLoop().run())
    assert idle.reason == "actions of the agreement"
    assert idle.limit_s is None and not idle.is_overdue
    (stands,) = told_after(tmp_path / "other", 200, TrainerState().wait())
    assert stands.reason == "what the daemon's state and its reason say" and not stands.is_overdue


def test_who_passes_others_on_waits_for_their_end_for_as_long_as_that_takes(tmp_path: Path) -> None:
    """A relay told its user of a wait over its bound, one minute after the first circuit."""
    (passes,) = told_after(tmp_path, 200, until_one_ends(now_and_then(), now_and_then()))
    assert passes.reason and not passes.is_overdue


def test_who_sleeps_or_looks_again_and_again_does_not_wait_long(tmp_path: Path) -> None:
    state = TrainerState()

    async def looks() -> None:
        while True:
            await state.wait(0.5)

    async def sleeps() -> None:
        await now_and_then()

    assert told_after(tmp_path, 100, looks(), sleeps()) == []


async def now_and_then() -> None:
    await asyncio.sleep(1000)


def test_the_overdue_come_first_and_equal_ones_are_counted(tmp_path: Path) -> None:
    idle, late = ActionLoop(), [unsettled() for _ in range(3)]
    first, second = told_after(tmp_path, 100, idle.run(), *late)
    assert (first.count, first.is_overdue) == (3, True)
    assert second.reason == "actions of the agreement"


def test_time_in_which_the_daemon_itself_was_stopped_does_not_count(tmp_path: Path) -> None:
    async def scene(swarm: Swarm) -> list[Wait]:
        tasks = {asyncio.create_task(unsettled())}
        own = OwnWaits(lambda: tasks)
        await asyncio.sleep(0)
        own.told()
        await asyncio.sleep(1000)  # nobody has looked
        return own.overdue()

    assert play(0, tmp_path, scene) == []


def test_each_place_without_a_limit_is_there() -> None:
    """A renamed place would excuse no one, and the tasks that wait there would be called
    overdue."""
    for place, reason in (WAITS_FOR_WORK | WAITS_OF_A_MACHINE).items():
        assert reason
        of_net = ("streams.", "libp2p.", "nat.", "direct.", "shared_work.")
        room = "net" if place.startswith(of_net) else "daemon"
        found = pkgutil.resolve_name(f"p2p_dtfm.{room}.{place}")
        assert inspect.iscoroutinefunction(found), place


def test_a_daemon_says_what_it_waits_for(tmp_path: Path) -> None:
    run = make_run(tmp_path, 10_000)

    async def scene(swarm: Swarm) -> dict[str, Any]:
        peer = swarm.peer("a", run=str(run), exit_when_done=False)
        swarm.start(peer)
        await swarm.until(lambda: peer.step() >= 3, "steps are taken", 60)
        await asyncio.sleep(30)
        daemon, process = peer.daemon, peer.process
        assert daemon is not None and process is not None

        async def asked() -> dict[str, Any]:
            return daemon.status_json()

        return await process.begin(asked())

    told = play(1, tmp_path / "homes", scene)
    reasons = {wait["owner"]: wait for wait in told["waits"]}
    assert "the daemon, for the end of the run" in {it["reason"] for it in told["waits"]}
    assert "node.participation.end_of_run.EndOfRun.when_done" in reasons
    assert all(wait["reason"] and wait["waited_s"] > 5 for wait in told["waits"])
    assert told["problems"] == []


def test_an_overdue_wait_is_wrong_only_while_no_step_commits() -> None:
    where = ("state_transfer.following.follower.Follower.run", "net.somewhere", 75.0)
    sight = Sight(State.SYNCING, "fetches layers", 80.0, 80.0, None, overdue=(where,))
    ((problem),) = problems_in(sight)
    assert "for 75 s state_transfer.following.follower.Follower.run" in problem.what
    assert not list(problems_in(replace(sight, uncommitted_s=2.0)))
    assert not list(problems_in(replace(sight, overdue=())))
    assert not list(problems_in(replace(sight, state=State.SPARE)))
