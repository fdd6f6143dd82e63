"""A peer that is in no view believes a view that all of its members have signed, if it knows one of
them. One member alone can make such a view up, with any plan. One word of it about a plan of 2^52
layers, or of no pipeline, had each peer that began again stand still for good, or err."""

import pytest

from p2p_dtfm.core.consensus.actions import Rejoin
from p2p_dtfm.core.messages.agreement_messages import Gather, PendingStep, PresentView, Ready
from p2p_dtfm.core.messages.prepared import Prepared, sign_prepared
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.simulated_process import sign_for
from tests.core.builders import WORKLOAD
from tests.core.liars import contribution, gather, say, swarm, view_of

NAMES = ["a", "b", "c"]
LAYERS, MICROBATCHES = WORKLOAD.layer_count, WORKLOAD.microbatch_count


def plan_of(*stages: Stage, first_microbatch: int = 0) -> Plan:
    return Plan((Pipeline(stages, first_microbatch, MICROBATCHES),), (), 1)


def told_by(liar: Member, newcomer: Member, number: int, plan: Plan) -> Gather:
    """The liar lets the newcomer into the next view after one that it has made alone."""
    view, signer = ViewId(number - 2, "f" * 64), sign_for(liar.peer_id)
    ready = stated(Ready(liar, view, plan.digest(), members_digest([liar])), signer)
    prepared = Prepared(view, 3, liar.peer_id, {0: 1.0}, 0.0, 0, 0.0, 0, None, "f")
    part = contribution(
        number,
        PresentView(view, (liar,), plan),
        liar,
        step=3,
        joiners=(newcomer,),
        pending=PendingStep(3, "f", (sign_prepared(prepared, signer),), ()),
    )
    proof = certified(view, (liar,), [ready])
    return gather(number, GENESIS, part, sender=liar, certificates=(proof,))


def begins_again(world: AgreementWorld, name: str) -> Member:
    world.send = lambda *_: None  # type: ignore[method-assign]
    world.peers[name].do([Rejoin("test")])
    agreement = world.peers[name].agreement
    assert agreement.view is None
    return agreement.me


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan((), (), 1), id="no pipeline"),
        pytest.param(plan_of(), id="no stage"),
        pytest.param(plan_of(Stage("c", 0, 2**52, 1)), id="layers without end"),
        pytest.param(plan_of(Stage("c", 1, LAYERS, 1)), id="a layer less"),
        pytest.param(plan_of(Stage("c", 0, LAYERS, 1), first_microbatch=2**52), id="microbatches"),
    ],
)
def test_a_plan_that_there_cannot_be_is_refused_by_who_begins_again(plan: Plan) -> None:
    world = swarm(NAMES)
    number, liar = view_of(world, "a").id.number // 2 * 2 + 5, Member("c", 1)
    me = begins_again(world, "a")
    _, fault = say(world, "c", "a", told_by(liar, me, number, plan))
    assert fault is not None and fault.peer_id == "c" and "plan" in fault.cause
    assert world.peers["a"].agreement._state.attempt is None


def test_one_that_there_may_be_is_heard() -> None:
    world = swarm(NAMES)
    number, liar = view_of(world, "a").id.number // 2 * 2 + 5, Member("c", 1)
    me = begins_again(world, "a")
    said = told_by(liar, me, number, plan_of(Stage("c", 0, LAYERS, 1)))
    _, fault = say(world, "c", "a", said)
    heard = world.peers["a"].agreement.last_heard
    assert fault is None and heard is not None and heard.reason.startswith("takes part")
