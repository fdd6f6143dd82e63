"""A holder that saves to a very slow disk blames nobody else for that."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual import disk
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.watching.suspicions import Suspicions
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import agreement_of

SEED = 1
VERY_SLOW_BYTES_PER_S = 15_000
SLOWER = 400
"""So much slower than the other one, a machine has no stage."""


@pytest.mark.nightly
def test_a_holder_that_saves_for_long_does_not_accuse_its_guardian(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said that it waits for a receipt of the next step, which it had not begun."""
    monkeypatch.setattr(disk, "SLOW_BYTES_PER_S", VERY_SLOW_BYTES_PER_S)
    run = make_run(tmp_path, 2000, saves_every_steps=10)

    async def scene(swarm: Swarm) -> str:
        swarm.are_equal = swarm.network.links.are_near = True
        holder = swarm.peer("a", run=str(run), expect_peers=2)
        guardian = swarm.peer("b", initial_peers=(swarm.address(holder),))
        guardian.flops_per_s //= SLOWER
        swarm.start(holder)
        await swarm.until(lambda: holder.has_run, "the run is founded", 60)
        swarm.start(guardian)
        await swarm.until(lambda: guardian.has_run and guardian.is_in_a_view, "a view", 90)
        await swarm.until(lambda: holder.step() >= 5, "steps", 60)
        view = agreement_of(holder).view
        assert view is not None and set(view.guards.values()) == {guardian.peer_id}
        assert view.cut_pace is None, "its guardian keeps up"
        suspicions = Suspicions(swarm)
        with suspicions.heard():
            holder.disk.is_slow = True
            await swarm.until(lambda: bool(suspicions.problem), "the guardian waits", 60)
        return suspicions.problem

    assert "b.0 says of a" in play(SEED, tmp_path / "world", scene)
