"""A leaver hands its voice to the members that it leaves, so a sleeper does not undo their
night."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.drawn_plans import any_plan
from tests.core.builders import WORKLOAD, record
from tests.sim.test_newcomers_in_trouble import are_together, joins


def pair(seed: int) -> AgreementWorld:
    world = AgreementWorld(seed, WORKLOAD, record("template"), any_plan, timing=TIMING)
    world.rejoins = True
    for name in ("founder", "sleeper"):
        joins(world, name)
    world.after(3 * SECOND_NS, lambda: world.found("founder"))
    world.run_until(lambda: are_together(world, ["founder", "sleeper"]))
    return world


AT_ONCE, LATER, AFTER_GUESTS = "at once", "after another has come and gone", "after two guests"


@pytest.mark.parametrize("when", [AT_ONCE, LATER, AFTER_GUESTS])
@pytest.mark.parametrize("seed", range(3))
def test_a_sleeper_goes_to_those_whom_the_founder_let_in_before_it_left(
    seed: int, when: str
) -> None:
    world = pair(seed)
    world.stop("sleeper")
    others = ("founder", "c", "d", "e", "g", "h")
    links = {pair for it in others for pair in (("sleeper", it), (it, "sleeper"))}
    wake = world.cut(links, "a machine that sleeps hears nothing")
    for name in ("c", "d"):
        joins(world, name)
    world.run_until(lambda: are_together(world, ["c", "d", "founder"]))
    world.leave("founder")
    world.run_until(lambda: are_together(world, ["c", "d"]))
    for guest in "gh" if when == AFTER_GUESTS else "":
        joins(world, guest)
        world.run_until(lambda name=guest: are_together(world, ["c", "d", name]))  # type: ignore[misc]
        world.leave(guest)
        world.run_until(lambda: are_together(world, ["c", "d"]))
    if when == LATER:
        joins(world, "e")
        world.run_until(lambda: are_together(world, ["c", "d", "e"]))
        world.leave("c")
        world.run_until(lambda: are_together(world, ["d", "e"]))
    world.run_to(world.now_ns + 30 * SECOND_NS)
    stay = ["d", "e"] if when == LATER else ["c", "d"]
    night = world.peers["d"].agreement.step
    assert night >= 15
    wake()
    world.go_on("sleeper")
    world.run_until(lambda: are_together(world, [*stay, "sleeper"]))
    assert min(world.peers[name].agreement.step for name in stay) >= night
    assert world.invariants.given_up_steps == 0
