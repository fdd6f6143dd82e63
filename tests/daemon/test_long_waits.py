"""What may rightly take longer than a minute is not told to be overdue: its user would be advised
to start again a daemon that is at work."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.dashboard.waits import TaskWaits, Wait
from p2p_dtfm.daemon.machine.byte_semaphore import ByteSemaphore
from p2p_dtfm.daemon.state_transfer.following.follower import Follower
from p2p_dtfm.daemon.step.reduction.step_reduction import _Courses
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from p2p_dtfm.net.shared_work import SharedWork
from p2p_dtfm.net.streams.wire import LineWire
from tests.daemon.test_waits import now_and_then, told_after, unsettled
from tests.net.test_lines_at_once import Counted, played

LONG_S = 200


async def of_a_step() -> None:
    """A step that takes minutes, as others' words wake nobody meanwhile."""
    await TrainerState().done_or_woken(asyncio.create_task(now_and_then()))


async def of_a_shard() -> None:
    """A data shard that comes over a thin line."""

    async def comes() -> Path:
        await now_and_then()
        return Path()

    await SharedWork[Path]().result("a shard", comes)


async def of_a_layer() -> None:
    """A fifth layer, which waits for the room of the first four."""
    room = ByteSemaphore(1, 1)
    follower: Any = SimpleNamespace(_tools=None, _room=room)
    offer: Any = SimpleNamespace(size_bytes=1)
    async with room.taken(1):
        await Follower._fetch(follower, "donor", offer)


async def of_digests() -> None:
    """Tasks that were begun before, all of which are waited for."""
    courses = _Courses(*[None] * 5)  # type: ignore[list-item]
    courses._digesting = [asyncio.create_task(now_and_then()) for _ in range(2)]
    await courses.all_got()


@pytest.mark.parametrize("work", [of_a_step, of_a_shard, of_a_layer, of_digests])
def test_who_waits_for_work_that_is_looked_at_itself_is_not_overdue(
    tmp_path: Path, work: Any
) -> None:
    """In each step of more than a minute the page said that the trainer waits for too long, and to
    start p2p-dtfm again. So it did of a newcomer whose data or layers took so long to come."""
    for wait in told_after(tmp_path, LONG_S, work()):
        assert wait.reason and not wait.is_overdue, wait


async def waits_of_all() -> list[Wait]:
    """The waits of all tasks here, as if each had lasted for long."""
    await asyncio.sleep(0.1)
    waits = TaskWaits()
    for passed_s in (0.0, LONG_S):
        waits.look(asyncio.all_tasks(), passed_s)
    return waits.told()


def test_a_task_is_not_excused_by_who_waits_for_it() -> None:
    async def scene() -> list[Wait]:
        stuck = asyncio.create_task(unsettled())
        waiting = asyncio.create_task(TrainerState().done_or_woken(stuck))
        found = await waits_of_all()
        for task in (stuck, waiting):
            task.cancel()
        return found

    (wait,) = [it for it in asyncio.run(scene()) if it.is_overdue]
    assert wait.place == "node.action_loop.ActionLoop.settled"


def test_a_line_may_rest_for_as_long_as_nothing_is_to_be_sent() -> None:
    """Of the waits that are overdue the longest is told. A line that rested since a view began was
    longer than any that something was wrong with, which then nobody heard of."""

    async def story(here: Counted, there: Counted) -> None:
        resting = asyncio.create_task(LineWire(here).read(8))
        found = await waits_of_all()
        resting.cancel()
        assert [it.place for it in found] == ["direct.line.DirectLine._rest_of"]
        assert found[0].reason and not found[0].is_overdue, found

    played(story)
