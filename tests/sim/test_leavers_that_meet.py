"""A leaving member finds the others in another view; the question is whether they want for what it
has."""

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS, Left, Rejoin
from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.statements import stated
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import CHECKPOINT_STEPS, sign_for
from tests.core.builders import record
from tests.core.liars import (
    RUN,
    are_together,
    say,
    self_made_view,
    swarm,
    trains_on,
    view_of,
)

COST = LayerCost(1, 1, 1, 1)


def by_who_stays(snapshot: Snapshot) -> Plan | NoPlan:
    """One pipeline of the members that stay. Steps take long, so guardians have each step's
    states."""
    names = [it.peer_id for it in snapshot.records if it.intent is not Intent.LEAVING]
    layers = snapshot.workload.layer_count
    cuts = [layers * number // len(names) for number in range(len(names) + 1)]
    stages = tuple(Stage(name, *cuts[n : n + 2], 1) for n, name in enumerate(names))
    spares = tuple(it.peer_id for it in snapshot.members if it.peer_id not in names)
    pipeline = Pipeline(stages, 0, snapshot.workload.microbatch_count)
    return Plan((pipeline,), spares, 60 * SECOND_NS)


def isolate(world: AgreementWorld, name: str) -> None:
    others = [it for it in world.peers if it != name]
    world.cut({(name, it) for it in others} | {(it, name) for it in others}, name)


@pytest.mark.parametrize("trains", [True, False])
def test_who_leaves_goes_at_once_only_where_the_others_take_steps(trains: bool) -> None:
    world = swarm(["a", "b", "c"])
    leaver = world.peers["c"]
    leaver.set_record(intent=Intent.LEAVING, sequence=leaver.record.sequence + 1)
    others = tuple(sorted(world.peers[name].agreement.me for name in "ab"))
    certificate = self_made_view(others, view_of(world, "c").id.number + 2, others)
    said = Standing(others[0], certificate, trains, leaver.agreement.step, RUN)
    actions, _ = say(world, "a", "c", stated(said, sign_for("a")))
    assert [type(it) for it in actions if isinstance(it, Left | Rejoin)] == (
        [Left] if trains else [Rejoin]
    )


def test_the_last_copy_comes_back_before_its_holder_leaves() -> None:
    """One member is cut off, and the guardian of its layers loses its memory. Neither side then has
    all layers of the newest step. The member that was cut off wants to leave, and the others' view
    counts more."""
    workload = Workload(2, 8, 0, 1, COST, COST, COST, 1)
    world = AgreementWorld(1, workload, record("template"), by_who_stays, timing=TIMING)
    world.rejoins = True
    for name in "abc":
        world.add_peer(name).agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found("a"))
    world.run_until(lambda: are_together(world, ["a", "b", "c"]))
    step = 2 * CHECKPOINT_STEPS - 1  # what is on disks is older by CHECKPOINT_STEPS - 1
    world.run_until(lambda: all(it.agreement.step == step for it in world.peers.values()))
    layers = view_of(world, "c").layers_of("c")
    (guardian,) = {view_of(world, "c").guards[layer] for layer in layers}
    (other,) = {"a", "b"} - {guardian}
    isolate(world, "c")
    world.crash(guardian, lose_disk=False)
    for name in (other, "c"):
        world.run_until(lambda name=name: is_without_plan(world, name), limit_s=20)  # type: ignore[misc]
    world.restart(guardian)
    world.run_until(lambda: set(view_of(world, other).member_ids) == {"a", "b"}, limit_s=20)
    assert is_without_plan(world, other), "else this shows nothing"
    world.leave("c")
    world.network.cuts.clear()
    world.run_until(lambda: isinstance(view_of(world, other).plan, Plan), limit_s=60)
    assert view_of(world, other).snapshot.step >= step, "no step is lost"
    world.run_until(lambda: world.peers["c"].left, limit_s=60)
    world.run_until(lambda: set(view_of(world, other).member_ids) == {"a", "b"}, limit_s=20)
    trains_on(world, ["a", "b"])


def is_without_plan(world: AgreementWorld, name: str) -> bool:
    return isinstance(view_of(world, name).plan, NoPlan)


def test_who_has_nothing_that_they_want_is_let_go_by_them() -> None:
    """The leaving member asked to be let in while the others took no steps; meanwhile they do."""
    world = swarm(["a", "b", "c"])
    world.add_peer("d")
    late = world.peers["d"]
    late.set_record(intent=Intent.LEAVING, sequence=late.record.sequence + 1)
    late.agreement.wants_view()
    world.ask_to_join("d", "a")
    world.run_until(lambda: late.left, limit_s=30)
    world.run_until(lambda: not world.peers["a"].agreement.next_view, limit_s=30)
    trains_on(world, ["a", "b", "c"])
    world.run_to(world.now_ns + 10 * SECOND_NS)  # a view may have been asked for as it left
    views = len(world.invariants.views)
    world.run_to(world.now_ns + 30 * SECOND_NS)
    assert len(world.invariants.views) == views, "nobody asks for it again"
