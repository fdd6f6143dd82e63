"""Which failures leave the plan as it was, and which call for another."""

import msgspec
import pytest

from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.feasibility import memory_pipeline
from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan, standing_plan
from p2p_dtfm.core.planner.search import search
from p2p_dtfm.core.planner.stability import PresentPlan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.prng import prng_of_digest
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from tests.core.planning import Peer, name_of, snapshot

STEP = 5


def after_failure(peer_count: int = 6) -> tuple[Snapshot, Plan]:
    """A snapshot of two pipelines of two stages, and spares; all have their layers at the step."""
    made = snapshot([Peer()] * peer_count)
    plan = fixed_plan(made, (2, 2))
    held = tuple(
        HeldLayer(stage.peer_id, layer, STEP)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for layer in stage.layers
    )
    changed = {"present": plan, "planned": False, "step": STEP, "held": held}
    return msgspec.structs.replace(made, **changed), plan


def without(made: Snapshot, number: int) -> Snapshot:
    records = tuple(r for r in made.records if r.peer_id != name_of(number))
    return msgspec.structs.replace(made, records=records)


@pytest.mark.parametrize("lost", [4, 5])
def test_a_lost_spare_changes_nothing_else(lost: int) -> None:
    made, plan = after_failure()
    found = compute_plan(without(made, lost))
    assert isinstance(found, Plan) and found.pipelines == plan.pipelines
    assert found.spares == tuple(name_of(n) for n in (4, 5) if n != lost)


def test_a_lost_message_changes_nothing() -> None:
    made, plan = after_failure()
    assert compute_plan(made) == plan


def test_what_calls_for_a_plan() -> None:
    made, plan = after_failure()
    assert standing_plan(made) == plan
    assert standing_plan(msgspec.structs.replace(made, planned=True)) is None
    assert standing_plan(without(made, 1)) is None, "a stage is lost"
    assert standing_plan(msgspec.structs.replace(made, held=made.held[1:])) is None, "and a state"
    assert standing_plan(msgspec.structs.replace(made, held=(), step=0)) == plan
    unlike = msgspec.structs.replace(made.workload, microbatch_count=1)
    assert standing_plan(msgspec.structs.replace(made, workload=unlike)) is None
    leaves = msgspec.structs.replace(made.records[0], intent=Intent.LEAVING)
    changed = msgspec.structs.replace(made, records=(leaves, *made.records[1:]))
    assert standing_plan(changed) is None
    newcomer, _ = after_failure(7)
    assert standing_plan(msgspec.structs.replace(newcomer, present=plan)) is None


def test_a_swarm_that_stands_still_searches_less() -> None:
    """The search finds a plan no worse than what still stands of the failed one."""
    made, plan = after_failure(8)
    problem = problem_of(made)
    fallback = memory_pipeline(problem)
    assert fallback is not None
    spent, found = [], []
    for in_a_hurry in (False, True):
        model = StepModel(problem)
        start = PresentPlan(model, plan, None).placement()
        prng = prng_of_digest(made.digest())
        found.append(search(model, fallback, prng, start, in_a_hurry).step_ns)
        spent.append(model.work)
    assert spent[1] * 2 < spent[0]
    assert found[1] <= found[0] * 21 // 20
