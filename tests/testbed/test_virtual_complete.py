"""Real daemons in virtual time: a run that is complete stays so, whoever leaves."""

import asyncio
from pathlib import Path

from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.saved import has_saved_all
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import are_in_views_of

STEPS = 12
TOO_LITTLE_GIB = 1.0 / 1024
"""Too little memory for the whole model, so one peer alone trains nothing."""


def test_a_complete_run_stays_complete_when_somebody_goes_home(tmp_path: Path) -> None:
    """The peer that stayed said for good, on its page and by webhook, that no steps happen for want
    of memory. It no longer said what can be done with the model."""
    run = make_run(tmp_path, STEPS, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        stays, goes = await complete_at_two(swarm, run)
        swarm.end(goes)
        await swarm.until(are_in_views_of([stays], 1), "a view without it", 60)
        await asyncio.sleep(5)
        assert stays.daemon is not None and stays.standing().startswith("done: all 12 steps")
        assert not stays.daemon.observer.problems()
        assert any("generate" in line for line in stays.daemon.observer.live().next)
        swarm.end(stays)
        await swarm.until(lambda: not stays.is_running, "it leaves", 20)

    play(1, tmp_path / "world", scene)


def test_who_has_the_model_and_finds_nobody_any_more_is_told_that_it_is_here(
    tmp_path: Path,
) -> None:
    """A volunteer's service looked for the others for ever after a reboot, long after the end of
    the run."""
    run = make_run(tmp_path, STEPS, saves_every_steps=5)

    async def scene(swarm: Swarm) -> None:
        founder, volunteer = await complete_at_two(swarm, run)
        for peer in (founder, volunteer):
            swarm.kill(peer)
        swarm.start(volunteer)
        await swarm.until(lambda: not volunteer.is_running, "it ends", 30)
        assert volunteer.ended is not None
        error = volunteer.ended.exception()
        assert isinstance(error, RunComplete) and error.exit_code == 5
        assert "the whole model is here" in error.fixes[0]

    play(1, tmp_path / "world", scene)


async def complete_at_two(swarm: Swarm, run: Path) -> list[Peer]:
    """Two peers that each have the model on disk, and no room to train it alone."""
    swarm.memory_gib, swarm.network.links.are_near = TOO_LITTLE_GIB, True
    stays: dict[str, object] = {"exit_when_done": False}
    first = swarm.peer("a", run=str(run), expect_peers=2, **stays)
    swarm.start(first)
    await swarm.until(lambda: first.has_run, "the run is founded", 60)
    other = swarm.peer("b", initial_peers=(swarm.address(first),), **stays)
    swarm.start(other)

    def is_at_the_end(peer: Peer) -> bool:
        return peer.standing().startswith("done") and has_saved_all(peer, STEPS)

    await swarm.until(lambda: all(map(is_at_the_end, (first, other))), "all is done", 120)
    await asyncio.sleep(1)
    return [first, other]
