"""A newcomer that cannot be reached, or never gets its states, costs the others little."""

from collections.abc import Sequence
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
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2))]


class TakesNoStates(SimulatedTraining):
    def take_states(self, reply: StateReply) -> None:
        assert isinstance(self.peer, NeverSynced)
        if self.peer.name not in self.peer.stuck:
            super().take_states(reply)


class NeverSynced(SimulatedPeer):
    """A peer that lives and answers, but gets no state."""

    training_type = TakesNoStates
    stuck: frozenset[str] = frozenset()


def one_pipeline(snapshot: Snapshot) -> Plan | NoPlan:
    """A plan in which each member holds a part of the model, so every newcomer needs states."""
    names = [member.peer_id for member in snapshot.members]
    layers = snapshot.workload.layer_count
    cuts = [layers * number // len(names) for number in range(len(names) + 1)]
    stages = tuple(Stage(name, cuts[n], cuts[n + 1], 1) for n, name in enumerate(names))
    return Plan((Pipeline(stages, 0, snapshot.workload.microbatch_count),), (), 1)


def started(
    seed: int,
    peer_type: type[SimulatedPeer] = SimulatedPeer,
    ready_ns: int = TIMING.ready_ns,
    members: Sequence[str] = MEMBERS,
) -> AgreementWorld:
    timing = replace(TIMING, sync_ns=SYNC_S * SECOND_NS, ready_ns=ready_ns)
    world = AgreementWorld(seed, WORKLOAD, record("template"), one_pipeline, timing=timing)
    world.peer_type = peer_type
    world.rejoins = True
    for name in members:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, list(members)))
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
@pytest.mark.parametrize("seed", SEEDS)
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


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_two_newcomers_that_cannot_reach_each_other_keep_nobody_out(seed: int, count: int) -> None:
    """Each newcomer said that the other is silent, and members that heard it kept out both. A
    member with two links in doubt was then out itself. All began anew every nine seconds, for
    ever."""
    members = MEMBERS[:count]
    world = started(seed, members=members)
    views = len(world.invariants.views)
    world.cut({("f", "h"), ("h", "f")}, "two that come")
    for name in ("f", "g", "h"):
        joins(world, name)
    world.run_until(lambda: len(stays(world, [*members, "g"])) == 1, limit_s=60)
    world.run_to(world.now_ns + 60 * SECOND_NS)
    assert len(stays(world, [*members, "g"])) == 1
    assert len(world.invariants.views) - views <= 8


def stays(world: AgreementWorld, names: list[str]) -> set[str]:
    """Which of `f` and `h` is in one view with all of these."""
    views = [world.peers[name].view for name in names]
    if any(view is None or view.id != views[0].id for view in views if views[0] is not None):
        return set()
    there = set(views[0].member_ids) if views[0] is not None else set()
    return there & {"f", "h"} if there >= set(names) else set()


@pytest.mark.parametrize("seed", range(5))
def test_those_that_found_a_run_do_so_together_again(seed: int) -> None:
    """Only the founder had heard of the others. Two that did not answer each other each began a
    swarm of their own."""
    world = AgreementWorld(seed, WORKLOAD, record("template"), one_pipeline, timing=TIMING)
    names = [*MEMBERS, "e", "f"]
    for name in names:
        world.add_peer(name)
    world.cut({("e", "f"), ("f", "e")}, "two that come")
    founder = world.peers["a"]
    for name in names[1:]:
        request = world.peers[name].agreement.wants_view()
        founder.do(founder.agreement.receive(name, request, founder.now_ns))
    founder.do(founder.agreement.found(founder.now_ns))
    world.run_until(lambda: all(world.peers[name].view is not None for name in MEMBERS))
    views = [world.peers[name].view for name in MEMBERS]
    assert len({view.id for view in views if view is not None}) == 1
    assert views[0] is not None and len(views[0].member_ids) >= len(MEMBERS)
