"""Scenes for bugs of steps and of what outlives them, which no seed that was tried has found: green
on the daemon as it is, and red with the bug. `test_virtual_scenes.py` plays them."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual import swarm as worlds
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun, participant_of
from tests.testbed.test_virtual_followed_states import replicas
from tests.testbed.test_virtual_speed import view_of

SEED = 1
SLOW_S = 2.0


def a_view_ends_while_data_come(folder: Path, patches: pytest.MonkeyPatch) -> None:
    """Of who is about to compute in it; of who died nothing comes any more."""
    run = make_run(folder, 2000, saves_every_steps=1000)
    patches.setattr(worlds, "compute_plan", replicas)

    async def scene(swarm: Swarm) -> None:
        a, b, c, d = await begun(swarm, run, "abcd")
        await swarm.until(lambda: min(it.step() for it in (a, b, c, d)) >= 5, "steps", 60)
        fetches, held = participant_of(b), list[bool]()
        fetch_shards = fetches.fetch_shards

        async def slowly(digests: set[str]) -> None:
            if not held:
                held.append(True)
                await asyncio.sleep(SLOW_S)
            await fetch_shards(digests)

        patches.setattr(fetches, "fetch_shards", slowly)
        await swarm.until(lambda: bool(held), "it fetches", 20)
        last = a.step()
        swarm.kill(c)
        others = (a, b, d)
        await swarm.until(lambda: min(it.step() for it in others) >= last + 5, "they go on", 30)
        assert len(view_of(a).members) == 3, "nobody is blamed"

    play(SEED, folder / "world", scene)
