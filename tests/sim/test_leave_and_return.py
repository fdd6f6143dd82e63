"""A peer that leaves and comes back at once, as after a short pause, is let in at its first try."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from tests.sim.test_newcomers_in_trouble import are_together
from tests.sim.test_voices_of_leavers import pair


@pytest.mark.parametrize("away_s", [1, 10])
@pytest.mark.parametrize("seed", range(3))
def test_who_comes_back_is_let_in_at_once(seed: int, away_s: int) -> None:
    world = pair(seed)
    world.leave("sleeper")
    world.run_until(lambda: are_together(world, ["founder"]))
    world.run_to(world.now_ns + away_s * SECOND_NS)
    world.crash("sleeper", lose_disk=False)
    world.peers["sleeper"].left = False
    world.restart("sleeper")
    view, since_ns = world.peers["founder"].agreement.view, world.now_ns
    world.run_until(lambda: are_together(world, ["founder", "sleeper"]))
    after = world.peers["founder"].agreement.view
    assert view is not None and after is not None
    assert after.snapshot.previous == view.id, "no view was in vain"
    assert world.now_ns - since_ns < 8 * SECOND_NS
