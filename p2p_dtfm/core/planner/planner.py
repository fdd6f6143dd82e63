"""From a snapshot to a plan."""

from typing import NamedTuple

import msgspec

from p2p_dtfm.core.audit.auditors import with_auditors
from p2p_dtfm.core.audit.believed_speeds import believed
from p2p_dtfm.core.audit.explained_speeds import is_borne_out, with_explained_speeds
from p2p_dtfm.core.audit.roles import alone, unproven, without_stage_yet
from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem, problem_of
from p2p_dtfm.core.cost_model.unmeasured import held_back
from p2p_dtfm.core.planner.feasibility import memory_pipeline, why_infeasible
from p2p_dtfm.core.planner.least_gain import without_idlers
from p2p_dtfm.core.planner.recomputation import problem_in_force, recomputing
from p2p_dtfm.core.planner.search import search
from p2p_dtfm.core.planner.stability import PresentPlan
from p2p_dtfm.core.planner.unlike_cuts import best_cut
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.measured_plans import agreed
from p2p_dtfm.core.protocol.plan import (
    LONGEST_STEP_NS,
    PLANNER_FAILS,
    NoPlan,
    Pipeline,
    Plan,
    Stage,
    check_plan,
)
from p2p_dtfm.core.protocol.prng import prng_of_digest
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.protocol.snapshot import Snapshot, sorted_records
from p2p_dtfm.core.protocol.workload import Workload

RECOMPUTING_PAYS = 32
"""Stages recompute only if that shortens a step by at least one part in so many."""


def compute_plan(snapshot: Snapshot) -> Plan | NoPlan:
    """The plan of a snapshot: a pure function, equal bytes everywhere.

    Peers that do not intend to train get no stage. `NoPlan` says what is short.
    """
    snapshot = msgspec.structs.replace(snapshot, records=sorted_records(list(snapshot.records)))
    snapshot = believed(snapshot)
    if (other := with_explained_speeds(snapshot, problem_in_force)) is not None:
        plan = _planned(other)
        if isinstance(plan, Plan) and is_borne_out(plan, snapshot):
            return plan
    return _planned(snapshot)


def _planned(snapshot: Snapshot) -> Plan | NoPlan:
    """The plan by what the snapshot tells. New keys cost nothing: if another new key gets the place
    that was kept from the first, no unproven one gets any."""
    plan = _without(snapshot, frozenset())
    if isinstance(plan, NoPlan) or not (by_itself := alone(snapshot, plan)):
        return plan
    plan = _without(snapshot, by_itself)
    if isinstance(plan, NoPlan) or not alone(snapshot, plan):
        return plan
    return _without(snapshot, unproven(snapshot))


def _without(snapshot: Snapshot, idle: frozenset[str]) -> Plan | NoPlan:
    """The plan in which the peers in `idle` get no stage, if the others can do without them."""
    problem = _problem(snapshot, idle)
    training = [record for record in snapshot.records if record.intent is Intent.TRAIN]
    able, wanted = len(training), max(1, snapshot.workload.min_members)
    if able < wanted:
        return NoPlan(
            f"this run asks for at least {counted(wanted, 'training peer')}; {able} of "
            f"{counted(len(snapshot.records), 'member')} can train now"
        )
    if (standing := standing_plan(snapshot)) is not None:
        return standing
    again = recomputing(problem)
    if snapshot.workload.recompute == "always":
        return _made(snapshot, again).plan
    plain = _made(snapshot, problem)
    if plain.has_room or snapshot.workload.recompute != "auto":
        return plain.plan
    other = _made(snapshot, again)
    if isinstance(other.plan, NoPlan) or isinstance(plain.plan, NoPlan):
        return plain.plan if isinstance(plain.plan, Plan) else other.plan
    gains = plain.step_ns() - other.step_ns()
    return other.plan if gains * RECOMPUTING_PAYS > plain.step_ns() else plain.plan


def standing_plan(snapshot: Snapshot) -> Plan | None:
    """The plan that failed, with the spares that are left; None where planning is called for.

    That is so in a planned view, where a stage has lost its peer, where that peer has lost the
    states, and where somebody is new.

    A failure that took no stage-holder, or only lost a message, leaves the plan in force as it was.
    Then there is no search: members agree as soon as they have gathered, and the step goes on.
    """
    plan = snapshot.present
    if snapshot.planned or plan is None or not _stands(snapshot, plan):
        return None
    members = {record.peer_id for record in snapshot.records}
    holders = set(plan.stage_holders())
    if not members <= holders | set(plan.spares):
        return None
    return _with_spares(snapshot, plan)


def without_planning(snapshot: Snapshot) -> Plan | NoPlan:
    """The plan where planning fails, which is a fault of this program: the plan in force, if it
    still stands. Otherwise nobody trains until other members are here. All members fail alike;
    without this, one that states what planners cannot bear would end all daemons."""
    plan = snapshot.present
    if plan is not None and _stands(snapshot, plan):
        return _with_spares(snapshot, plan)
    return NoPlan(f"{PLANNER_FAILS}: it cannot plan with what these members state")


def _stands(snapshot: Snapshot, plan: Plan) -> bool:
    """Whether the plan is of this run, and all its stage-holders are here, train, and have their
    states."""
    work = snapshot.workload
    if not plan.covers(work.layer_count, work.microbatch_count):
        return False
    training = {r.peer_id for r in snapshot.records if r.intent is Intent.TRAIN}
    if not set(plan.stage_holders()) <= training:
        return False
    if snapshot.planned or snapshot.step == 0:
        return True
    states = snapshot.states()
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return all(states.get(it.peer_id, set()).issuperset(it.layers) for it in stages)


def _with_spares(snapshot: Snapshot, plan: Plan) -> Plan:
    """The plan with all members that have no stage as its spares."""
    members = {record.peer_id for record in snapshot.records}
    return msgspec.structs.replace(plan, spares=tuple(sorted(members - {*plan.stage_holders()})))


def _problem(snapshot: Snapshot, idle: frozenset[str]) -> PlanningProblem:
    """The planning problem without peers that must wait, unless the others have too little memory.
    Peers wait while their links are not measured, or while they are new where work is audited."""
    waiting = held_back(snapshot) | without_stage_yet(snapshot) | idle
    if waiting:
        problem = problem_of(snapshot, waiting)
        if problem.peer_count and _holds_all(problem, snapshot.workload):
            return problem
    return problem_of(snapshot)


def _holds_all(problem: PlanningProblem, workload: Workload) -> bool:
    """Whether these peers have memory for the model, in one of the ways that the run allows."""
    if workload.recompute != "always" and memory_pipeline(problem) is not None:
        return True
    is_allowed = workload.recompute in ("auto", "always")
    return is_allowed and memory_pipeline(recomputing(problem)) is not None


class _Made(NamedTuple):
    """A plan, and what it was made of."""

    plan: Plan | NoPlan
    has_room: bool = False
    """Whether every stage has memory for all that it wants in flight."""
    timed: tuple[StepModel, PlacementCost] | None = None

    def step_ns(self) -> int:
        """A step by present measurements; a plan that stays says what was predicted when it was
        made."""
        assert self.timed is not None
        model, cost = self.timed
        return model.judged(cost).step_ns


def _made(snapshot: Snapshot, problem: PlanningProblem) -> _Made:
    fallback = memory_pipeline(problem)
    if fallback is None:
        return _Made(why_infeasible(problem))
    model = StepModel(problem)
    # in a planned view members have what their present stages need
    states = None if snapshot.planned else snapshot.states()
    measured = agreed({record.peer_id: record.measured for record in snapshot.records})
    present = PresentPlan(model, snapshot.present, states, measured) if snapshot.present else None
    warm = present.placement() if present else None
    in_a_hurry = warm is not None and not snapshot.planned  # all wait; search starts from the plan
    best = search(model, fallback, prng_of_digest(snapshot.digest()), warm, in_a_hurry)
    best = best_cut(model, best, in_a_hurry)
    wanted = present.choose(best) if present else best
    settled = present.held if present else ()
    wanted = without_idlers(model, wanted, snapshot.workload.least_gain_ppm, settled)
    chosen = present.at_once(wanted) if present and in_a_hurry else wanted
    is_hurried = _shape(chosen) != _shape(wanted)
    chosen, is_stopgap = with_auditors(model, snapshot, chosen)
    unchanged = present.unchanged(chosen) if present else None
    plan = unchanged or plan_of(problem, model.judged(chosen))
    if is_hurried or is_stopgap:
        plan = msgspec.structs.replace(plan, provisional=True)
    return _Made(plan, _has_room(model, chosen), (model, chosen))


def _shape(cost: PlacementCost) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Who holds which layers in which pipeline."""
    cuts = (pipeline.cuts for pipeline in cost.pipelines)
    return sorted(zip(cost.placement, cuts, strict=True))


def _has_room(model: StepModel, cost: PlacementCost) -> bool:
    for peers, pipeline, count in zip(
        cost.placement, cost.pipelines, cost.microbatches, strict=True
    ):
        wanted, _ = model.pipelines_in(len(cost.placement)).time(peers, pipeline.cuts)
        if any(map(int.__lt__, pipeline.in_flight, (min(each, count) for each in wanted))):
            return False
    return True


def plan_of(problem: PlanningProblem, cost: PlacementCost) -> Plan:
    """The plan that carries out a placement; all other members are spares."""
    order = sorted(range(len(cost.placement)), key=lambda number: cost.placement[number])
    pipelines: list[Pipeline] = []
    first = 0
    for number in order:
        cut, count = cost.pipelines[number], cost.microbatches[number]
        stages = tuple(
            Stage(
                problem.peer_ids[peer],
                cut.cuts[position],
                cut.cuts[position + 1],
                min(count, cut.in_flight[position]),
            )
            for position, peer in enumerate(cost.placement[number])
        )
        pipelines.append(Pipeline(stages, first, count, cut.codecs_of(problem)))
        first += count
    used = {peer for peers in cost.placement for peer in peers}
    spares = [problem.peer_ids[peer] for peer in range(problem.peer_count) if peer not in used]
    step_ns = min(cost.step_ns, LONGEST_STEP_NS)
    plan = Plan(tuple(pipelines), tuple(sorted([*spares, *problem.idle])), step_ns)
    members = {*problem.peer_ids, *problem.idle}
    check_plan(plan, problem.layer_count, problem.step.microbatch_count, members)
    return plan


def fixed_plan(snapshot: Snapshot, stage_counts: tuple[int, ...]) -> Plan:
    """Members in sorted order as pipelines of these stage counts, whatever it costs.

    Layers are split evenly, microbatches in proportion to the stages; for tests and comparisons.
    Members beyond the sum of `stage_counts` are spares.
    """
    problem = problem_of(snapshot)
    layers, microbatches = problem.layer_count, problem.step.microbatch_count
    total = sum(stage_counts)
    assert 0 < total <= problem.peer_count, (stage_counts, problem.peer_count)
    assert all(0 < count <= layers for count in stage_counts), (stage_counts, layers)
    pipelines: list[Pipeline] = []
    done = 0
    for count in stage_counts:
        first = microbatches * done // total
        end = microbatches * (done + count) // total
        stages = tuple(
            Stage(
                problem.peer_ids[done + position],
                layers * position // count,
                layers * (position + 1) // count,
                max(1, min(end - first, count - position)),
            )
            for position in range(count)
        )
        pipelines.append(Pipeline(stages, first, end - first))
        done += count
    spares = tuple(sorted([*problem.peer_ids[total:], *problem.idle]))
    plan = Plan(tuple(pipelines), spares, 0)
    check_plan(plan, layers, microbatches, {*problem.peer_ids, *problem.idle})
    return plan


__all__ = ["Placement", "compute_plan", "fixed_plan", "plan_of"]
