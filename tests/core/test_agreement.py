"""Agreement in virtual time: founding, joining and leaving settle, over bad networks too."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, Report
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.lossy_network import LossyNetwork
from tests.core.builders import WORKLOAD, record


def one_pipeline_each(snapshot: Snapshot) -> Plan | NoPlan:
    """Each member that trains holds the whole model; the first one takes the microbatches left
    over."""
    able = [record.peer_id for record in snapshot.records if record.intent is Intent.TRAIN]
    names = able[: snapshot.workload.microbatch_count]
    if not names:
        return NoPlan("nobody stays")
    spares = tuple(member.peer_id for member in snapshot.members if member.peer_id not in names)
    pipelines, first = [], 0
    for number, name in enumerate(names):
        total = snapshot.workload.microbatch_count
        count = total // len(names) + (number < total % len(names))
        stage = Stage(name, 0, snapshot.workload.layer_count, 1)
        pipelines.append(Pipeline((stage,), first, count))
        first += count
    return Plan(tuple(pipelines), spares, 1)


def make_world(seed: int, network: LossyNetwork | None = None) -> AgreementWorld:
    return AgreementWorld(seed, WORKLOAD, record("template"), one_pipeline_each, network)


BAD_NETWORK = LossyNetwork(delay_ns=(1_000_000, 1_500_000_000), loss=0.1, repeat=0.1)


def same_view(world: AgreementWorld, names: list[str]) -> bool:
    views = [world.peers[name].view for name in names]
    if any(view is None for view in views):
        return False
    ids = {view.id for view in views if view is not None}
    return len(ids) == 1 and views[0] is not None and list(views[0].member_ids) == sorted(names)


def test_a_founder_alone_trains() -> None:
    world = make_world(1)
    world.add_peer("a")
    first = world.peers["a"].agreement.found(world.peers["a"].now_ns)
    assert Report("opens view 1: founding") in first
    world.peers["a"].do(first)
    world.run_until(lambda: world.peers["a"].agreement.step >= 5)
    assert same_view(world, ["a"])


def test_a_return_to_the_first_step_is_not_called_founding() -> None:
    """The peer was killed before there was a checkpoint, and its home remembers the view."""
    world = make_world(1)
    peer = world.add_peer("a")
    world.found("a")
    world.run_until(lambda: peer.agreement.step >= 1)
    world.crash("a", lose_disk=False)
    peer.disk.clear()
    world.restart("a")
    told = peer.agreement.found(peer.now_ns)
    assert next(item.text for item in told if isinstance(item, Report)).endswith(
        "alone, from step 0"
    )


@pytest.mark.parametrize(
    "seed",
    [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 25))],
)
@pytest.mark.parametrize("network", [LossyNetwork(), BAD_NETWORK], ids=["good", "bad"])
def test_newcomers_join_while_steps_go_on_and_one_leaves(seed: int, network: LossyNetwork) -> None:
    world = make_world(seed, network)
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        world.add_peer(name)
    world.found("a")
    for number, name in enumerate(names[1:]):
        world.after(number * SECOND_NS * 2, lambda name=name: world.ask_to_join(name, "a"))
    world.run_until(lambda: same_view(world, names), limit_s=600)
    step = world.peers["a"].agreement.step
    world.leave("c")
    world.run_until(lambda: world.peers["c"].left, limit_s=600)
    stay = ["a", "b", "d", "e"]
    world.run_until(lambda: same_view(world, stay), limit_s=600)
    world.run_until(
        lambda: all(world.peers[n].agreement.step >= step + 3 for n in stay), limit_s=600
    )
    committed = sorted(world.invariants.commits)
    assert committed == list(range(len(committed))), "every step commits exactly once"


@pytest.mark.parametrize("seed", range(5))
def test_a_newcomer_that_dies_in_gather_does_not_stop_the_others(seed: int) -> None:
    world = make_world(seed)
    for name in ("a", "b", "dead"):
        world.add_peer(name)
    world.found("a")
    world.ask_to_join("dead", "a")
    world.ask_to_join("b", "a")
    world.after(SECOND_NS // 10, lambda: setattr(world.peers["dead"], "alive", False))
    world.run_until(lambda: same_view(world, ["a", "b"]), limit_s=120)


def test_all_leave() -> None:
    world = make_world(3)
    for name in ("a", "b"):
        world.add_peer(name)
    world.found("a")
    world.ask_to_join("b", "a")
    world.run_until(lambda: same_view(world, ["a", "b"]))
    world.leave("a")
    world.leave("b")
    world.run_until(lambda: all(peer.left for peer in world.peers.values()), limit_s=300)
