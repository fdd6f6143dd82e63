"""Real daemons in virtual time: a founder comes back while it cannot reach those that train on."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import are_in_views_of, begun


@pytest.mark.parametrize("waits_for", ["waits 15 s at most", "expected peers are here"])
def test_a_founder_that_finds_nobody_at_first_goes_on_looking(
    tmp_path: Path, waits_for: str
) -> None:
    """It had looked once, and waited for those that it expected for a minute, though all of them
    were in reach again; then it trained alone, from older states, until it met them by chance
    (seed 500505)."""
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> None:
        founder, *others = await begun(swarm, run, "abc")
        await swarm.until(lambda: founder.step() >= 20, "steps", 120)
        swarm.kill(founder)
        for other in others:
            swarm.cut(founder, other)
        await swarm.until(are_in_views_of(others, 2), "the others go on", 60)
        swarm.start(founder)
        await swarm.until(lambda: waits_for in founder.standing(), "it finds nobody", 60)
        for other in others:
            swarm.mend(founder, other)
        await swarm.until(are_in_views_of(others, 3), "it is let in", 30)
        views = [event for event in founder.events() if event["event"] == "view"]
        assert all(len(event["members"]) > 1 for event in views), "it has trained with them alone"

    play(1, tmp_path / "world", scene)
