"""A member without a stage finds all its lines broken at once, and makes a view of its own before
it has said anything. Nothing waits for this member, and it is heard again before it is missed. The
others must still find that it has gone."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import WORKLOAD, record
from tests.sim.test_newcomers_in_trouble import MEMBERS, are_together

SPARE = "d"


def spare_where_others_are(snapshot: Snapshot) -> Plan | NoPlan:
    """A view in which one of the others holds the whole model."""
    names = [member.peer_id for member in snapshot.members]
    workload = snapshot.workload
    stage = Stage(names[0], 0, workload.layer_count, 1)
    return Plan((Pipeline((stage,), 0, workload.microbatch_count),), tuple(names[1:]), 1)


def started(seed: int, wide_above: int) -> AgreementWorld:
    timing = replace(TIMING, wide_above=wide_above)
    template = record("template")
    world = AgreementWorld(seed, WORKLOAD, template, spare_where_others_are, timing=timing)
    world.rejoins = True
    for name in MEMBERS:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, MEMBERS))
    return world


@pytest.mark.parametrize("wide_above", [3, TIMING.wide_above], ids=["along the overlay", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_it_is_missed_and_comes_back(seed: int, wide_above: int) -> None:
    world = started(seed, wide_above)
    spare = world.peers[SPARE]

    def is_astray() -> bool:
        return spare.view is not None and spare.view.member_ids == (SPARE,)

    others = [name for name in MEMBERS if name != SPARE]
    heal = world.cut({way for it in others for way in ((it, SPARE), (SPARE, it))}, "its lines")
    for name in others:
        spare.do(spare.agreement.suspect(name, "its stream broke", world.now_ns))
    world.run_until(is_astray, limit_s=3)
    heal()
    world.run_until(lambda: not is_astray(), limit_s=30)
    world.run_until(lambda: are_together(world, MEMBERS), limit_s=40)
