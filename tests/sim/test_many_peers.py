"""Views whose members speak with their neighbours only."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.consensus.phase import Phase
from p2p_dtfm.sim.faults.agreement_seeds import TIMING, run_seed
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import WORKLOAD, record
from tests.core.liars import are_together, one_pipeline, trains_on

WIDE = replace(TIMING, wide_above=3)


@pytest.mark.parametrize("seed", [0, 1, 110])
def test_what_holds_under_faults_holds_along_the_overlay(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [*range(2, 60), 68, 79, 114, 144])
def test_the_same_of_many_seeds(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])


def test_a_newcomer_that_is_cut_off_while_they_gather_asks_anew() -> None:
    """The newcomer has accused all members in vain, since their neighbours have not. It waits no
    longer."""
    world = AgreementWorld(1, WORKLOAD, record("template"), one_pipeline, timing=WIDE)
    world.rejoins = True
    names = ["a", "b", "c", "d"]
    for name in names:
        world.add_peer(name).agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, names))
    world.run_to(world.now_ns + 2 * SECOND_NS)  # among many the first step goes before newcomers
    late = world.add_peer("e").agreement
    late.wants_view()
    world.run_until(
        lambda: late.outlook(world.now_ns).phase is Phase.NEWCOMER_GATHERING, limit_s=20
    )
    links = {(name, "e") for name in names} | {("e", name) for name in names}
    heal = world.cut(links, "e")
    world.run_to(world.now_ns + 60 * SECOND_NS)
    assert not late.attempting
    heal()
    world.run_until(lambda: are_together(world, [*names, "e"]), limit_s=90)
    trains_on(world, names)
