"""Where work is audited, a plan leaves nobody's work to be computed again by colluders alone.

The fastest placement may be two peers with all layers beside others with parts of them. Then each
of the two is audited by the other alone, at any rate. And of few stage-holders colluders are soon
most. So the planner looks for at least three members with room for the whole model. All of them get
it, and at least a microbatch each, if the plan that was found falls short in one of two ways: it
gives somebody fewer than two possible auditors, or a stage to fewer than half of those members.
Then a quarter that lies is less than half of those who judge.

Where too few have that room, pipelines are cut alike (`alike_pipelines`). Unlike members cost time,
so a member more than four times as slow as the middle one is left out. A few that say they are fast
do not move the middle.
"""

from collections.abc import Sequence
from typing import NamedTuple

from p2p_dtfm.core.audit.alike_pipelines import cut_alike
from p2p_dtfm.core.cost_model.costs import PlacementCost, StepModel
from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.snapshot import Snapshot

AUDITORS = 2
"""So many besides the holder: of two that differ nobody knows which one is wrong."""
SLOWEST_FACTOR = 4


class Auditable(NamedTuple):
    """What the planner makes of a placement in a run with audits."""

    cost: PlacementCost
    is_stopgap: bool = False
    """A planned view is to follow: at once, others would have to get states while all wait."""


class _Whole(NamedTuple):
    """A peer that has room for the whole model."""

    peer: int
    cost: PipelineCost
    once_ns: int
    """For one microbatch."""


def with_auditors(model: StepModel, snapshot: Snapshot, found: PlacementCost) -> Auditable:
    """`found`, or the whole model for all who have room for it. Where these are too few, pipelines
    that are cut alike."""
    if not snapshot.bars:  # in a run with audits all members stand among them
        return Auditable(found)
    able = _not_too_slow(_able(model))
    if min(len(able), model.problem.step.microbatch_count) <= AUDITORS:
        return _in_pipelines(model, snapshot, found)
    if _has_auditors(found) and 2 * found.stage_count >= len(able):
        return Auditable(found)
    here = able
    if snapshot.step > 0 and not snapshot.planned:
        states, layers = snapshot.states(), model.problem.layer_count
        ids = model.problem.peer_ids
        here = [it for it in able if len(states.get(ids[it.peer], ())) == layers]
    chosen = _chosen(model, snapshot, here)
    if len(chosen) <= AUDITORS:
        return Auditable(found, is_stopgap=True)
    placement = tuple((each.peer,) for each in chosen)
    dealt = _dealt(chosen, model.problem.step.microbatch_count)
    made = model.dealt(placement, [each.cost for each in chosen], dealt)
    return Auditable(made, is_stopgap=len(here) < len(able))


def _in_pipelines(model: StepModel, snapshot: Snapshot, found: PlacementCost) -> Auditable:
    if _has_auditors(found):
        return Auditable(found)
    for at_once in (True, False):
        alike = cut_alike(model, snapshot, found, 1 + AUDITORS, at_once=at_once)
        if alike is not None:
            return Auditable(alike) if at_once else Auditable(found, is_stopgap=True)
    return Auditable(found)


def _able(model: StepModel) -> list[_Whole]:
    problem = model.problem
    layers = problem.layer_count
    found = []
    for peer in range(problem.peer_count):
        timed = model.pipelines_in(1 + AUDITORS).time_fixed((peer,), (0, layers))
        if timed is not None and problem.may_hold(peer, 0, layers):
            found.append(_Whole(peer, timed, timed.duration_ns(1)))
    return found


def _not_too_slow(able: Sequence[_Whole]) -> list[_Whole]:
    if not able:
        return []
    middle_ns = sorted(each.once_ns for each in able)[(len(able) - 1) // 2]
    return [each for each in able if each.once_ns <= SLOWEST_FACTOR * middle_ns]


def _has_auditors(cost: PlacementCost) -> bool:
    held = {
        peer: range(pipeline.cuts[at], pipeline.cuts[at + 1])
        for peers, pipeline in zip(cost.placement, cost.pipelines, strict=True)
        for at, peer in enumerate(peers)
    }
    return all(
        sum(theirs.start <= mine.start and mine.stop <= theirs.stop for theirs in held.values())
        > AUDITORS
        for mine in held.values()
    )


def _chosen(model: StepModel, snapshot: Snapshot, able: Sequence[_Whole]) -> list[_Whole]:
    """As many peers as there are microbatches: first those that have a stage, then others by a
    draw. Who tells last what it knows can choose that draw (decision 77)."""
    ids = model.problem.peer_ids
    holders = snapshot.present.stage_holders() if snapshot.present is not None else ()
    seed = snapshot.knowledge or snapshot.run_digest

    def turn(each: _Whole) -> tuple[bool, str]:
        peer_id = ids[each.peer]
        return peer_id not in holders, digest_bytes(encode([seed, peer_id]))

    first = sorted(able, key=turn)[: model.problem.step.microbatch_count]
    return sorted(first, key=lambda each: each.peer)


def _dealt(chosen: Sequence[_Whole], microbatches: int) -> tuple[int, ...]:
    """Microbatches: each peer gets one, and the others go where they end soonest."""
    counts = [1] * len(chosen)
    for _ in range(microbatches - len(chosen)):
        ends = [(each.once_ns * (counts[at] + 1), at) for at, each in enumerate(chosen)]
        counts[min(ends)[1]] += 1
    return tuple(counts)
