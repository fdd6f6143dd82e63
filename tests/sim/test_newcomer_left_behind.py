"""A member crashes when a newcomer has agreed to its view: the others go on without them both, and
the newcomer, to which nobody speaks of that view any more, does not wait for it for long."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, Timing
from tests.sim.test_newcomers_in_trouble import MEMBERS, are_together, joins, started

LIMIT_S = 40


@pytest.mark.parametrize("back_s", [1, 300], ids=["comes back", "stays away"])
@pytest.mark.parametrize("lost", MEMBERS)
@pytest.mark.parametrize("seed", range(2))
def test_it_is_let_in_soon(seed: int, lost: str, back_s: int) -> None:
    world = started(seed, ready_ns=Timing().ready_ns)
    world.rejoins = False
    newcomer = joins(world, "f")
    world.ask_to_join("f", lost)

    def has_agreed() -> bool:
        attempt = newcomer.agreement._state.attempt
        return attempt is not None and attempt.snapshot is not None and attempt.planned

    world.run_until(has_agreed)
    world.crash(lost, lose_disk=False)
    world.rejoins = True  # whoever has no view asks anybody
    world.after(back_s * SECOND_NS, lambda: world.restart(lost))
    stay = [name for name in MEMBERS if name != lost]
    there = [*MEMBERS, "f"] if back_s < LIMIT_S else [*stay, "f"]
    world.run_until(lambda: are_together(world, sorted(there)), LIMIT_S)
