"""A newcomer that cannot be reached, or never gets its states, costs the others little."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.hash_training import StateReply
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_training import SimulatedTraining
from tests.core.builders import WORKLOAD, record

MEMBERS = ["a", "b", "c", "d"]
SYNC_S = 20


class TakesNoStates(SimulatedTraining):
    def take_states(self, reply: StateReply) -> None:
        assert isinstance(self.peer, NeverSynced)
        if self.peer.name not in self.peer.stuck:
            super().take_states(reply)


class NeverSynced(SimulatedPeer):
    """Lives and answers, but no state arrives here."""

    training_type = TakesNoStates
    stuck: frozenset[str] = frozenset()


def one_pipeline(snapshot: Snapshot) -> Plan | NoPlan:
    """Everyone holds a part of the model, so every newcomer needs states."""
    names = [member.peer_id for member in snapshot.members]
    layers = snapshot.workload.layer_count
    cuts = [layers * number // len(names) for number in range(len(names) + 1)]
    stages = tuple(Stage(name, cuts[n], cuts[n + 1], 1) for n, name in enumerate(names))
    return Plan((Pipeline(stages, 0, snapshot.workload.microbatch_count),), (), 1)


def started(
    seed: int, peer_type: type[SimulatedPeer] = SimulatedPeer, ready_ns: int = TIMING.ready_ns
) -> AgreementWorld:
    timing = replace(TIMING, sync_ns=SYNC_S * SECOND_NS, ready_ns=ready_ns)
    world = AgreementWorld(seed, WORKLOAD, record("template"), one_pipeline, timing=timing)
    world.peer_type = peer_type
    world.rejoins = True
    for name in MEMBERS:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, MEMBERS))
    return world


def are_together(world: AgreementWorld, names: list[str]) -> bool:
    views = [world.peers[name].view for name in names]
    whole = all(v is not None and list(v.member_ids) == sorted(names) for v in views)
    return whole and len({view.id for view in views if view is not None}) == 1


def joins(world: AgreementWorld, name: str) -> SimulatedPeer:
    peer = world.add_peer(name)
    peer.agreement.wants_view()
    return peer


@pytest.mark.parametrize("one_way", [False, True], ids=["both ways", "one way"])
@pytest.mark.parametrize("seed", range(3))
def test_a_link_that_stays_cut_does_not_churn_views(seed: int, one_way: bool) -> None:
    world = started(seed)
    views, step = len(world.invariants.views), world.invariants.furthest
    links = {("a", "c")} if one_way else {("a", "c"), ("c", "a")}
    heal = world.cut(links, "one link")
    world.run_to(world.now_ns + 30 * SECOND_NS)
    joins(world, "f")
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert len(world.invariants.views) - views <= 6
    assert world.invariants.furthest - step >= 20, "the others train"
    assert world.peers["f"].view is not None, "others may join meanwhile"
    heal()
    world.run_until(lambda: are_together(world, [*MEMBERS, "f"]), limit_s=90)


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_without_its_states_is_given_up(seed: int) -> None:
    class OneNeverSynced(NeverSynced):
        stuck = frozenset({"stuck"})

    world = started(seed, OneNeverSynced)
    joins(world, "stuck")
    world.run_until(lambda: world.peers["a"].agreement.next_view is not None)
    joins(world, "f")
    world.run_until(lambda: world.peers["f"].view is not None, limit_s=3 * SYNC_S)
    view = world.peers["f"].view
    assert view is not None and isinstance(view.plan, Plan) and "stuck" not in view.member_ids
    step = world.invariants.furthest
    world.run_until(lambda: world.invariants.furthest >= step + 5)


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_that_dies_in_its_download_is_given_up(seed: int) -> None:
    class OneNeverSynced(NeverSynced):
        stuck = frozenset({"dies"})

    world = started(seed, OneNeverSynced)
    joins(world, "dies")
    world.run_until(lambda: world.peers["a"].agreement.next_view is not None)
    world.crash("dies", lose_disk=False)
    joins(world, "f")
    world.run_until(lambda: are_together(world, [*MEMBERS, "f"]), limit_s=SYNC_S)
