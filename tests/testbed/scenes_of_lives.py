"""Scenes for bugs of who comes and goes, which no seed that was tried has found: green on the daemon
as it is, and red with the bug. `test_virtual_scenes.py` plays them."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import are_in_views_of, begun

SEED = 1
DAY_S = 86_400.0


def a_clock_is_put_right(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """One life begins by a clock that is a day ahead, and the next by a right one."""
    run = make_run(folder, 2000)

    async def scene(swarm: Swarm) -> None:
        a, b, c = await begun(swarm, run, "abc")
        await swarm.until(lambda: c.step() >= 10, "steps", 60)
        for ahead_s in (DAY_S, 0.0):
            swarm.kill(c)
            swarm.set_clock(c, ahead_s)
            await swarm.until(are_in_views_of([a, b], 2), "they go on", 30)
            swarm.start(c)
            await swarm.until(are_in_views_of([a, b], 3), "it is let in", 30)

    play(SEED, folder / "world", scene)
