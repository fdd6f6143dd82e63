"""A newcomer is let in where members wait for lost layers. Left alone there it must not take the
first step for the furthest one, and the members not give up for that what they have come to."""

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import CHECKPOINT_STEPS
from tests.core.builders import record
from tests.core.liars import are_together, one_pipeline, trains_on, view_of
from tests.sim.sim_support import found_together

WAITS, LOST, NEWCOMER = "a", ["b", "c", "d"], "z"
COST = LayerCost(1, 1, 1, 1)


def test_a_newcomer_left_alone_among_lost_layers_does_not_begin_anew() -> None:
    workload = Workload(2, 8, 0, 1, COST, COST, COST, min_members=1)
    world = AgreementWorld(1, workload, record("template"), one_pipeline, timing=TIMING)
    world.rejoins = True
    found_together(world, [WAITS, *LOST])
    world.run_until(lambda: are_together(world, [WAITS, *LOST]))
    # guardians lag: by then nobody may go back to the beginning at once
    world.run_until(lambda: world.peers[WAITS].agreement.step >= 50)
    step = world.peers[WAITS].agreement.step
    for name in LOST:
        world.crash(name, lose_disk=False)
    world.run_until(lambda: isinstance(view_of(world, WAITS).plan, NoPlan))
    world.add_peer(NEWCOMER).agreement.wants_view()
    world.ask_to_join(NEWCOMER, WAITS)
    world.run_until(lambda: are_together(world, [WAITS, NEWCOMER]))
    pair = (WAITS, NEWCOMER)
    heal = world.cut([pair, pair[::-1]], "what is between them")
    world.run_to(world.now_ns + 8 * SECOND_NS)
    assert view_of(world, NEWCOMER).member_ids == (NEWCOMER,)
    assert isinstance(view_of(world, NEWCOMER).plan, NoPlan)
    heal()
    world.run_to(world.now_ns + 2 * SECOND_NS)
    for name in LOST:
        world.restart(name)
    world.run_until(lambda: are_together(world, [WAITS, *LOST, NEWCOMER]))
    trains_on(world, [WAITS, *LOST, NEWCOMER])
    assert world.peers[NEWCOMER].agreement.step >= step - 2 * CHECKPOINT_STEPS, "what disks have"
