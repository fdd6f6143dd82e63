"""Whose word makes steps late, where nobody alone can see it: in pipelines of several stages.

Only its holder knows how fast a stage is. Its neighbours know how long they waited, and each can
blame the other. But most members tell alike how long steps take under a plan. That may be notably
more than the members' words make of it. Then members that say they are faster than the middle one
are doubted: first each alone, then all together. A doubted member is taken to be as fast as the
middle one. The plan is made by the doubt that best explains what was seen, under the plan in force
and those before.

It is a guess, and may fall on an honest fast member whose line or neighbour is what is slow. So it
counts only as long as the plan that comes of it is hardly slower than another one that was tried.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.audit.believed_speeds import believed, slower, there_and_back_ns
from p2p_dtfm.core.cost_model.costs import Placement, StepModel
from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.protocol.layers.timings import timings_of
from p2p_dtfm.core.protocol.measured_plans import PlanShape, agreed, names_in, shape_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Device, Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload

LATE_PERCENT = 150
"""Steps that take more than this part of what the members' words predict need an explanation."""
FASTER_PERCENT = 125
"""Only a peer that claims this part of the middle one's speed, or more, is doubted."""
BETTER_PERCENT = 80
"""An explanation must be off by less than this part of what the words are off by."""
WORSE_PERCENT = 110
"""A plan by an explanation may take at most this part of the shortest steps that were seen."""
FEWEST, MOST = 3, 64
"""Members that train. Of two nobody is the middle one; with more, a plan is too large to tell."""
SUSPECTS_LIMIT = 16
PLANS_LIMIT = 16
"""So many plans are looked at."""

InForce = Callable[[Snapshot, Plan], PlanningProblem]
"""The problem from which a plan of that snapshot was made."""


class _Tried(NamedTuple):
    """A plan under which steps were timed."""

    shape: PlanShape
    placement: Placement
    cuts: tuple[tuple[int, ...], ...]
    dealt: tuple[int, ...]
    """Microbatches by pipeline: of the plan in force as they are, of others as they would be dealt
    by the members' words."""
    took_ns: int


def with_explained_speeds(snapshot: Snapshot, in_force: InForce) -> Snapshot | None:
    """The snapshot with those peers as fast as the middle one whose words explain why steps are
    late. It loses what late steps took under plans with such a peer. None if nothing explains it.
    """
    plan, measured = snapshot.present, _measured(snapshot)
    if plan is None or not measured or not FEWEST <= len(_training(snapshot)) <= MOST:
        return None
    model = StepModel(in_force(snapshot, plan))
    tried = list(_tried(model, plan, measured))
    late = [it for it in tried if it.took_ns * 100 > LATE_PERCENT * _predicted_ns(model, it)]
    if not late:
        return None
    best, best_permille = None, _worst_permille(model, tried) * BETTER_PERCENT // 100
    for doubted in _suspicions(snapshot, late):
        told = _as_the_middle_one(snapshot, doubted, frozenset(it.shape for it in late))
        permille = _worst_permille(StepModel(in_force(told, plan)), tried)
        if permille < best_permille:
            best, best_permille = told, permille
    return best


def doubted(plan: Plan, snapshot: Snapshot, in_force: InForce) -> list[str]:
    """Peers that this plan of the snapshot takes to be slower than their word. Nobody has seen that
    they are, and nobody is blamed for it."""
    found, snapshot = as_planned(plan, snapshot, in_force), believed(snapshot)
    pairs = zip(found.records, snapshot.records, strict=True)
    return [taken.peer_id for taken, told in pairs if taken.device != told.device]


def as_planned(plan: Plan, snapshot: Snapshot, in_force: InForce) -> Snapshot:
    """The snapshot as this plan took it: each peer is as slow as others have seen it, or as slow as
    explains what steps took."""
    snapshot = believed(snapshot)
    found = with_explained_speeds(snapshot, in_force)
    return found if found is not None and is_borne_out(plan, snapshot) else snapshot


def is_borne_out(plan: Plan, snapshot: Snapshot) -> bool:
    """Whether the plan by an explanation is hardly slower than another one that was tried. Its own
    time is as it was seen, or else as it is predicted."""
    measured = _measured(snapshot)
    step_ns = measured.get(shape_of(plan), plan.predicted_step_ns)
    return step_ns * 100 <= WORSE_PERCENT * min(measured.values(), default=step_ns)


def _measured(snapshot: Snapshot) -> dict[PlanShape, int]:
    """By plan, what its steps took. More than half of all members must tell of it, and all of those
    that had a stage: a few liars cannot tell of steps that nobody else has seen. Where work is
    audited most of the holders are enough: else a liar would tell of none."""
    told = {record.peer_id: record.measured for record in snapshot.records}
    counts = Counter(it.shape for measured in told.values() for it in measured)
    found = agreed(told, by_most=bool(snapshot.bars))
    seen = (it for it in found.items() if 2 * counts[it[0]] > len(told))
    here = (it for it in seen if names_in(it[0]) <= told.keys())
    return dict(sorted(here, key=lambda it: (-counts[it[0]], it[0]))[:PLANS_LIMIT])


def _tried(model: StepModel, plan: Plan, measured: Mapping[PlanShape, int]) -> Iterator[_Tried]:
    """The plans whose peers are all still here and have room."""
    for shape, took_ns in measured.items():
        found = _placed(model, plan, shape)
        if found is not None:
            yield found._replace(took_ns=took_ns)


def _placed(model: StepModel, plan: Plan, shape: PlanShape) -> _Tried | None:
    problem = model.problem
    numbers = {peer_id: number for number, peer_id in enumerate(problem.peer_ids)}
    is_here = names_in(shape) <= numbers.keys() and len(shape) <= problem.step.microbatch_count
    if not is_here or {cuts[-1] for _, cuts in shape} != {problem.layer_count}:
        return None
    placement = tuple(tuple(numbers[it] for it in peers) for peers, _ in shape)
    cuts = tuple(each for _, each in shape)
    timed = _timed(model, placement, cuts)
    if len(timed) < len(shape):
        return None
    if shape == shape_of(plan):
        counts = {tuple(s.peer_id for s in it.stages): it.microbatch_count for it in plan.pipelines}
        dealt = tuple(counts[peers] for peers, _ in shape)
    else:
        cost = model.combine(placement, timed, None)
        assert cost is not None, "without a bound it is always timed"
        by_peers = dict(zip(cost.placement, cost.microbatches, strict=True))
        dealt = tuple(by_peers.get(peers, 0) for peers in placement)
    return _Tried(shape, placement, cuts, dealt, 0)


def _timed(
    model: StepModel, placement: Placement, cuts: tuple[tuple[int, ...], ...]
) -> list[PipelineCost]:
    """The costs of those pipelines that have room."""
    pipelines = model.pipelines_in(len(placement))
    each = (pipelines.time_fixed(*pair) for pair in zip(placement, cuts, strict=True))
    return [it for it in each if it is not None]


def _predicted_ns(model: StepModel, tried: _Tried) -> int:
    timed = _timed(model, tried.placement, tried.cuts)
    return max(1, model.dealt(tried.placement, timed, tried.dealt).step_ns)


def _worst_permille(model: StepModel, tried: list[_Tried]) -> int:
    """By how much the model is off where it is off most, either way; 1000 is no error."""
    pairs = [sorted((it.took_ns, _predicted_ns(model, it))) for it in tried]
    return max((1000 * slower // faster for faster, slower in pairs), default=0)


def _suspicions(snapshot: Snapshot, late: list[_Tried]) -> Iterator[frozenset[str]]:
    """Whom to doubt: each peer alone, then all together. A peer is doubted if by its word it is
    fast in any kind of layer: saying that it is slow in a kind that it never gets excuses nobody.
    """
    middles_ns = _middles_ns(snapshot)
    named = frozenset[str]().union(*(names_in(it.shape) for it in late))
    fast = sorted(
        (min(map(_ppm, _each_ns(it, snapshot), middles_ns)), it.peer_id)
        for it in _training(snapshot)
        if it.peer_id in named and _is_fast(_each_ns(it, snapshot), middles_ns)
    )
    doubted = [peer_id for _, peer_id in fast[:SUSPECTS_LIMIT]]
    yield from (frozenset([it]) for it in doubted)
    if len(doubted) > 1:
        yield frozenset(doubted)


def _is_fast(each_ns: Sequence[int], middles_ns: Sequence[int]) -> bool:
    pairs = zip(each_ns, middles_ns, strict=True)
    return any(own * FASTER_PERCENT <= 100 * middle for own, middle in pairs)


def _ppm(own_ns: int, middle_ns: int) -> int:
    return 1_000_000 * own_ns // middle_ns


def _training(snapshot: Snapshot) -> list[PeerRecord]:
    return [record for record in snapshot.records if record.intent is Intent.TRAIN]


def _each_ns(record: PeerRecord, snapshot: Snapshot) -> list[int]:
    """By kind of layer that the run has: there and back through one layer."""
    return list(map(there_and_back_ns, timings_of(record.device, snapshot.workload)))


def _middles_ns(snapshot: Snapshot) -> list[int]:
    """By kind of layer, the middle time; of two middle ones the slower. Liars that are fewer than
    half do not move it to their side."""
    told = [_each_ns(it, snapshot) for it in _training(snapshot)]
    return [sorted(each)[len(each) // 2] for each in zip(*told, strict=True)]


def _as_the_middle_one(
    snapshot: Snapshot, doubted: frozenset[str], late: frozenset[PlanShape]
) -> Snapshot:
    middles_ns = _middles_ns(snapshot)

    def told(record: PeerRecord) -> PeerRecord:
        measured = tuple(
            it for it in record.measured if it.shape not in late or not doubted & names_in(it.shape)
        )
        device = record.device
        if record.peer_id in doubted:
            device = _no_faster(device, snapshot.workload, middles_ns)
        return msgspec.structs.replace(record, device=device, measured=measured)

    return msgspec.structs.replace(snapshot, records=tuple(map(told, snapshot.records)))


def _no_faster(device: Device, workload: Workload, middles_ns: Sequence[int]) -> Device:
    """The device, as slow as the middle one in each kind of layer in which it says it is faster."""
    timings = [
        slower(timing, max(own_ns, middle_ns), own_ns)
        for timing, middle_ns in zip(timings_of(device, workload), middles_ns, strict=True)
        for own_ns in (there_and_back_ns(timing),)
    ]
    if workload.unlike is not None:
        return msgspec.structs.replace(device, listed=tuple(timings))
    embedding, block, head = timings
    return msgspec.structs.replace(device, embedding=embedding, block=block, head=head)
