"""A meeting point of a world lives until it is killed."""

import asyncio
import gc
from pathlib import Path

from p2p_dtfm.testbed.virtual.swarm import Swarm, play


def test_a_meeting_point_that_came_back_is_not_collected_while_it_waits(tmp_path: Path) -> None:
    """Nobody knew what its task waits for. Where it was collected, a peer that had nothing to do
    with it was charged with a task that was destroyed (seed 940000)."""

    async def scene(swarm: Swarm) -> None:
        swarm.put_behind_routers(["a"], "chance", "a")
        point = swarm.meeting_point
        assert point is not None
        await asyncio.sleep(1)
        point.kill()
        point.start()
        await asyncio.sleep(1)
        before = swarm.loop.tasks()
        names = [it.get_coro().__qualname__ for it in before]
        del before
        gc.collect()
        assert "_live" in names
        assert [it.get_coro().__qualname__ for it in swarm.loop.tasks()] == names

    play(1, tmp_path / "world", scene)
