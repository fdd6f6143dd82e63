"""Nobody has some layers any more. Members wait for those that may still bring them, and for nobody
else."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from tests.core.builders import WORKLOAD, record
from tests.sim.test_newcomers_in_trouble import are_together, joins


def one_after_another(snapshot: Snapshot) -> Plan | NoPlan:
    """One pipeline through the first members; its steps are so short that guardians lag."""
    names = sorted(record.peer_id for record in snapshot.records)
    layers, microbatches = snapshot.workload.layer_count, snapshot.workload.microbatch_count
    placed, spares = names[:layers], tuple(names[layers:])
    cuts = [layers * n // len(placed) for n in range(len(placed) + 1)]
    stages = tuple(Stage(p, cuts[n], cuts[n + 1], 1) for n, p in enumerate(placed))
    return Plan((Pipeline(stages, 0, microbatches),), spares, SECOND_NS)


def trained_together(seed: int, names: list[str]) -> AgreementWorld:
    """The first member trains alone for a while, then all for a few steps. It still holds layers of
    which nobody has a copy."""
    world = AgreementWorld(seed, WORKLOAD, record("template"), one_after_another, timing=TIMING)
    world.rejoins = True
    world.compute_ns = (SECOND_NS // 20, SECOND_NS // 10)  # copies take longer than some steps
    joins(world, names[0])
    world.after(3 * SECOND_NS, lambda: world.found(names[0]))
    world.run_until(lambda: world.peers[names[0]].agreement.step >= 7)
    for name in names[1:]:
        joins(world, name)
    world.run_until(lambda: are_together(world, names))
    step = world.peers[names[1]].agreement.step
    world.run_until(lambda: world.peers[names[1]].agreement.step >= step + 2)
    return world


def lost_layers(world: AgreementWorld, name: str) -> tuple[int, ...]:
    view = world.peers[name].view
    return view.snapshot.lost_layers if view is not None else ()


def seconds_until_they_train(world: AgreementWorld, names: list[str]) -> float:
    began_ns = world.now_ns
    world.run_until(lambda: are_together(world, names) and not lost_layers(world, names[0]))
    took_s = (world.now_ns - began_ns) / SECOND_NS
    step = world.peers[names[0]].agreement.step
    world.run_until(lambda: min(world.peers[it].agreement.step for it in names) >= step + 2)
    return took_s


@pytest.mark.parametrize("seed", (1, 5, 6))
def test_once_all_are_back_nobody_is_waited_for(seed: int) -> None:
    names = ["founder", "member"]
    world = trained_together(seed, names)
    world.crash("founder", lose_disk=False)
    world.run_until(lambda: bool(lost_layers(world, "member")))
    world.restart("founder")
    assert seconds_until_they_train(world, names) < 15 < TIMING.lost_layers_ns / SECOND_NS


@pytest.mark.parametrize("seed", (1, 3))
def test_who_may_still_bring_them_is_waited_for(seed: int) -> None:
    """Peers that were not there at the time before do not hurry the others."""
    names = ["founder", "member", "other"]
    world = trained_together(seed, names)
    for gone in ("founder", "other"):
        world.crash(gone, lose_disk=False)
    world.run_until(lambda: bool(lost_layers(world, "member")))
    world.restart("founder")
    for newcomer in ("a", "b", "c"):
        joins(world, newcomer)
    since_ns = world.now_ns
    world.run_until(lambda: not lost_layers(world, "member"))
    assert world.now_ns - since_ns >= TIMING.lost_layers_ns // 2


def test_another_swarm_that_trains_is_not_followed_while_they_are_waited_for() -> None:
    """Otherwise the members with these layers come back to a swarm that has nothing in common with
    them. A swarm of three that trains yields to nobody, so there would be two for ever (seed
    841)."""
    names = ["founder", "member"]
    world = trained_together(1, names)
    joins(world, "newcomer")
    pairs = {(name, "newcomer") for name in names}
    heal = world.cut(pairs | {(newcomer, name) for name, newcomer in pairs}, "alone")
    world.crash("founder", lose_disk=False)
    world.run_until(lambda: world.peers["newcomer"].view is not None)
    before = world.peers["member"].view
    assert before is not None and before.snapshot.lost_layers
    heal()
    meets_until_ns = world.now_ns + 2 * TIMING.meet_ns
    world.run_until(lambda: world.now_ns >= meets_until_ns)
    now = world.peers["member"].view
    assert now is not None and now.id >= before.id and "member" in now.member_ids, "it has stayed"
    world.restart("founder")
    everyone = [*names, "newcomer"]
    world.run_until(lambda: are_together(world, everyone), limit_s=60)
    assert world.peers["member"].agreement.step > 7, "and goes on from what the founder had"
