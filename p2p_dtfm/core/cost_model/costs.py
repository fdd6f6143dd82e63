"""Predicted nanoseconds of a step for a placement of peers in pipelines.

    step = max over peers of (their segments' gradients ready + reduction) + commit

Pipelines compute side by side (`pipeline_cost`); microbatches are dealt so that the last pipeline
ends soonest. Reduction: `reduction_cost`; a lone pipeline has guardians instead (`guarding`).
Commit: Prepared travels between the two stage-holders that are farthest apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from operator import getitem

from p2p_dtfm.core.cost_model.guarding import Guarded, Guarding, waited_for
from p2p_dtfm.core.cost_model.pipeline_cost import (
    PipelineCost,
    PipelineModel,
    are_alike,
    can_end_by,
    pipeline_models,
    split_microbatches,
)
from p2p_dtfm.core.cost_model.pipeline_timing import TimedPipeline, stage_ends_ns
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.reduction_cost import ReductionModel
from p2p_dtfm.core.cost_model.reduction_timing import Reduction, reduced_ns
from p2p_dtfm.core.cost_model.segment_weights import MOST_PAIRS as MOST_PAIRS_DIVIDED
from p2p_dtfm.core.cost_model.segment_weights import segment_weights
from p2p_dtfm.core.cost_model.step_timing import StepEnds, event_count, least_ns, step_ends
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS
from p2p_dtfm.core.cost_model.tables.segment_table import CutSegment, SegmentTable
from p2p_dtfm.core.schedule.pieces import pieces_of
from p2p_dtfm.core.virtual.virtual_time import NEVER_NS, TooLate

Placement = tuple[tuple[int, ...], ...]
"""Pipelines as ordered peer numbers."""

PLACEMENT_WORK, EACH_PIPELINE_WORK = 10, 4
MOST_PAIRS = 120_000
"""Pairs of holders over all segments: with more, no reduction is timed link by link."""
MOST_TASKLETS = 300_000
"""Tasklets of a placement: with more, its pipelines are not timed tasklet by tasklet."""
MOST_EVENTS = 300_000
"""Events of a step: with more, not even the final plan is simulated."""


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """What a placement costs; the tuples are parallel to `placement`."""

    placement: Placement
    pipelines: tuple[PipelineCost, ...]
    microbatches: tuple[int, ...]
    compute_ns: int
    """Time until the last backward of the slowest pipeline."""
    reduction_ns: int
    """Time from then until every segment is reduced; with a lone pipeline, until its guardians have
    what they wait for (`guarding`)."""
    commit_ns: int
    critical: int
    """A peer that holds up the reduction; -1 if there is none."""
    pipelines_ns: int = field(default=0, compare=False)
    """Least time of the pipelines, however microbatches are dealt; compared with a bound."""
    is_tied: bool = field(default=False, compare=False)
    """Whether the order of pipelines decided which of two got a microbatch."""

    @property
    def stage_count(self) -> int:
        return sum(map(len, self.placement))

    @property
    def step_ns(self) -> int:
        return self.compute_ns + self.reduction_ns + self.commit_ns


class StepModel:
    """The cost model of one problem, with what it has worked out so far."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self._lone, self._shared = pipeline_models(problem)
        self.reductions = ReductionModel(problem)
        self._segment_table = SegmentTable()
        self._guarding = Guarding(problem)
        self._ends: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._segments_of: dict[tuple[object, ...], list[Reduction] | None] = {}
        self._ends_alike: dict[tuple[object, ...], tuple[int, ...]] = {}
        self._refined: dict[tuple[object, ...], PlacementCost] = {}
        self._simulated: dict[tuple[object, ...], StepEnds] = {}
        self._work = self._first_work = 0

    @property
    def forgotten(self) -> int:
        """How often a result was dropped whose work would be counted once more."""
        return self._shared.forgotten + self._lone.forgotten + self.reductions.forgotten

    @property
    def first_work(self) -> int:
        """The part of `work` that is not done again when the same placement comes again."""
        return self._first_work + self.reductions.first_work

    @property
    def work(self) -> int:
        """The work of searching, in about microseconds."""
        return self._work + self.reductions.work

    def pipelines_in(self, count: int) -> PipelineModel:
        """The model for pipelines of a plan with so many: stages shared by replicas take more."""
        return self._shared if count > 1 else self._lone

    def spend(self, work: int) -> None:
        """Count work done elsewhere."""
        self._work += work

    def cost(self, placement: Placement, bound_ns: int | None = None) -> PlacementCost | None:
        """Cost of a placement, without the pipelines that get no microbatch.

        None if a pipeline does not fit, or if the step surely takes longer than `bound_ns`.
        """
        costs = self.timed(placement)
        return None if costs is None else self.combine(placement, costs, bound_ns)

    def timed(self, placement: Placement) -> list[PipelineCost] | None:
        """The timed pipelines of a placement; None if one does not fit."""
        costs: list[PipelineCost] = []
        self._work += PLACEMENT_WORK + EACH_PIPELINE_WORK * len(placement)
        pipelines = self.pipelines_in(len(placement))
        for peers in placement:
            cost, fresh = pipelines.cost(peers)
            if fresh:
                self._work += 40 * len(peers)
                self._first_work += 40 * len(peers)
            if cost is None:
                return None
            costs.append(cost)
        return costs

    def combine(
        self, placement: Placement, costs: list[PipelineCost], bound_ns: int | None
    ) -> PlacementCost | None:
        """Deals microbatches to pipelines that are already timed, and adds reduction and commit.

        Where all are cut alike, those that take long to reduce end sooner.
        """
        count = self.problem.step.microbatch_count
        if bound_ns is not None and not can_end_by(costs, count, bound_ns):
            return None
        dealt, is_tied = split_microbatches(costs, count)
        if 0 in dealt:
            placement, costs, dealt = _used(placement, costs, dealt)
        longest_ns = max(map(PipelineCost.duration_ns, costs, dealt))
        if bound_ns is not None and bound_ns < longest_ns:
            return None
        tails = self._tails(placement, costs) if are_alike(costs) else []
        if tails:
            again, is_tied_again = split_microbatches(costs, count, [tail for tail, _ in tails])
            dealt = dealt if 0 in again else again
            is_tied |= is_tied_again
        return self._total(placement, costs, dealt, tails, (longest_ns, is_tied))

    def dealt(
        self, placement: Placement, costs: list[PipelineCost], dealt: tuple[int, ...]
    ) -> PlacementCost:
        """The cost with so many microbatches for each pipeline; without those that get none."""
        if 0 in dealt:
            placement, costs, dealt = _used(placement, costs, dealt)
        tails = self._tails(placement, costs) if are_alike(costs) else []
        return self._total(placement, costs, dealt, tails)

    def _total(
        self,
        placement: Placement,
        costs: list[PipelineCost],
        dealt: tuple[int, ...],
        tails: list[tuple[int, int]],
        as_dealt: tuple[int, bool] = (0, False),
    ) -> PlacementCost:
        durations = list(map(PipelineCost.duration_ns, costs, dealt))
        compute, commit = max(durations), self._commit_ns(placement)
        if len(placement) == 1:
            ends = costs[0].ends_ns(dealt[0])
            reduced, critical = self._guarded_ns(placement[0], costs[0], ends, commit), -1
        elif tails:
            reduced, critical = max(
                (end + tail, peer) for end, (tail, peer) in zip(durations, tails, strict=True)
            )
        else:
            each = [cost.ends_ns(count) for cost, count in zip(costs, dealt, strict=True)]
            reduced, critical = self._reduced_ns(placement, costs, each)
        spent = compute, max(0, reduced - compute), commit
        return PlacementCost(placement, tuple(costs), dealt, *spent, critical, *as_dealt)

    def refined(self, cost: PlacementCost) -> PlacementCost:
        """The cost, timed more exactly as far as that is cheap: pipelines tasklet by tasklet
        (`pipeline_timing`), the reduction link by link (`reduction_timing`)."""
        key = cost.placement, cost.pipelines, cost.microbatches
        found = self._refined.get(key)
        if found is None:
            if len(self._refined) > 1 << 10:
                self._refined.clear()
            found = self._refined[key] = self._refine(cost)
        return found

    def _refine(self, cost: PlacementCost) -> PlacementCost:
        ends = self._stage_ends(cost)
        compute = max(each[0] for each in ends)
        ready = {
            peer: end
            for peers, each in zip(cost.placement, ends, strict=True)
            for peer, end in zip(peers, each, strict=True)
        }
        segments = self._divided(cost)
        if len(cost.placement) == 1:
            reduced = self._guarded_ns(
                cost.placement[0], cost.pipelines[0], ends[0], cost.commit_ns
            )
        elif not segments:
            reduced, _ = self._reduced_ns(cost.placement, list(cost.pipelines), ends)
        else:
            reduced = reduced_ns(self.problem, segments, ready)
        return replace(cost, compute_ns=compute, reduction_ns=max(0, reduced - compute))

    def simulated(self, cost: PlacementCost) -> PlacementCost:
        """The cost, timed message by message (`step_timing`); `events` tells the work of it."""
        found = self.simulated_within(cost, NEVER_NS)
        assert found is not None, "nothing takes that long"
        return found

    def simulated_within(self, cost: PlacementCost, limit_ns: int) -> PlacementCost | None:
        """The same as `simulated`; it may be None where the step takes longer than `limit_ns`."""
        segments = self._divided(cost)
        assert segments is not None, "a step of so many pairs is not simulated"
        key = cost.placement, cost.pipelines, cost.microbatches
        ends = self._simulated.get(key)
        if ends is None:
            if len(self._simulated) > 1 << 10:
                self._simulated.clear()
            try:
                ends = self._simulated[key] = self._step_ends(cost, segments, limit_ns)
            except TooLate:
                return None
        computed, reduced = ends.computed_ns, ends.reduced_ns
        commit = ends.committed_ns - reduced + self.problem.ends_meet_ns(cost.placement)
        reduction = reduced - computed
        return replace(cost, compute_ns=computed, reduction_ns=reduction, commit_ns=commit)

    def _step_ends(self, cost: PlacementCost, segments: list[Reduction], limit_ns: int) -> StepEnds:
        timed = self._timed(cost)
        if len(timed) > 1:
            if least_ns(timed) > limit_ns:
                raise TooLate
            return step_ends(self.problem, timed, segments, limit_ns=limit_ns)
        ends = step_ends(self.problem, timed, segments)
        guarded = waited_for(self._guarded(timed[0].peers, cost.pipelines[0]), ends.committed_ns)
        return step_ends(self.problem, timed, segments, guarded) if guarded else ends

    def events(self, cost: PlacementCost) -> int:
        """Events to simulate a step; one on a shared uplink counts as several."""
        segments = self._divided(cost)
        if segments is None:
            return 1 << 40
        links = self.problem.links
        limits = min(*links.uplink_bytes_per_s, *links.downlink_bytes_per_s)
        dear = 1 if limits >= UNLIMITED_BYTES_PER_S else 3
        return dear * event_count(self._timed(cost), segments)

    def pairs(self, cost: PlacementCost) -> int:
        """Pairs of holders that `refined` looks at."""
        return sum(len(each.holders) ** 2 for each in self._divided(cost) or ()) or MOST_PAIRS

    def judged(self, cost: PlacementCost) -> PlacementCost:
        """The cost, timed as exactly as can be afforded once."""
        affordable = self.events(cost) <= MOST_EVENTS
        return self.simulated(cost) if affordable else self.refined(cost)

    def _timed(self, cost: PlacementCost) -> list[TimedPipeline]:
        counted = zip(cost.placement, cost.pipelines, cost.microbatches, strict=True)
        timings, steps = self._shared.stage_timings, self.problem.step.inner_steps
        return [
            TimedPipeline(peers, timings(peers, pipeline), count, steps)
            for peers, pipeline, count in counted
        ]

    def _stage_ends(self, cost: PlacementCost) -> list[tuple[int, ...]]:
        """When each stage of each pipeline has done its last backward."""
        counted = list(zip(cost.placement, cost.pipelines, cost.microbatches, strict=True))
        tasklets = sum(2 * count * len(peers) for peers, _, count in counted)
        if tasklets > MOST_TASKLETS:
            return [pipeline.ends_ns(count) for _, pipeline, count in counted]
        return [self._ends_of(*each) for each in counted]

    def _ends_of(
        self, peers: tuple[int, ...], pipeline: PipelineCost, count: int
    ) -> tuple[int, ...]:
        key = (peers, pipeline.cuts, pipeline.in_flight, count)
        found = self._ends.get(key)
        if found is None:
            stages = self._shared.stage_timings(peers, pipeline)
            if len(self._ends) > 1 << 14:
                self._ends.clear()
            found = self._ends_alike.get((stages, count))
            if found is None:
                if len(self._ends_alike) > 1 << 12:
                    self._ends_alike.clear()
                steps = self.problem.step.inner_steps
                found = self._ends_alike[stages, count] = stage_ends_ns(stages, count, steps)
            self._ends[key] = found
        return found

    def _divided(self, cost: PlacementCost) -> list[Reduction] | None:
        """What is reduced, and how much of it each holder owns; None if that takes too long."""
        if len(cost.placement) == 1:
            return []
        key = cost.placement, tuple(pipeline.cuts for pipeline in cost.pipelines)
        if key not in self._segments_of:
            if len(self._segments_of) > 1 << 8:
                self._segments_of.clear()
            self._segments_of[key] = self._divide(cost)
        return self._segments_of[key]

    def _divide(self, cost: PlacementCost) -> list[Reduction] | None:
        divided = [
            (
                tuple(sorted(map(getitem, cost.placement, stages))),
                self.reductions.segment_bytes(first, end),
            )
            for first, end, stages in self._segments(cost.pipelines)
        ]
        pieces = self._pieces(cost)
        if sum(
            len(each) * len(pair[0]) ** 2 for each, pair in zip(pieces, divided, strict=True)
        ) > (MOST_PAIRS):
            return None
        rates = self.problem.links.pair_bytes_per_s
        weights = segment_weights(
            divided,
            lambda a, b: rates[a][b],
            self.reductions.limit,
            lambda holders, alone: self.reductions.group(holders, alone).weights,
        )
        return [
            Reduction(holders, parts, *piece)
            for (holders, _), parts, each in zip(divided, weights, pieces, strict=True)
            for piece in each
        ]

    def _pieces(self, cost: PlacementCost) -> list[list[tuple[int, tuple[int, ...]]]]:
        """The pieces of each segment's reduction: (bytes, `below_ns` of its sorted holders)."""
        found = []
        place = {
            peer: (position, pipeline.cuts[position])
            for peers, pipeline in zip(cost.placement, cost.pipelines, strict=True)
            for position, peer in enumerate(peers)
        }
        size, last_part = self.reductions.segment_bytes, self._shared.last_part_ns
        for first, end, stages in self._segments(cost.pipelines):
            holders = tuple(sorted(map(getitem, cost.placement, stages)))
            layers = map(self.problem.layers.of, range(first, end))
            elements = [layer.gradient_elements for layer in layers]
            found.append(
                [
                    (
                        size(first + piece.start, first + piece.stop),
                        tuple(
                            0  # differences set out together
                            if self.problem.step.inner_steps
                            else last_part(
                                peer, place[peer][1], first + piece.start, place[peer][0]
                            )
                            for peer in holders
                        ),
                    )
                    for piece in pieces_of(elements, len(holders))
                ]
            )
        return found

    def _tails(self, placement: Placement, costs: list[PipelineCost]) -> list[tuple[int, int]]:
        """For each pipeline, all cut alike: (how long after its end the reduction ends, by whom)"""
        self._work += sum(map(len, placement))
        cuts, nobody = costs[0].cuts, (0,) * len(costs)
        found = [(-1 << 100, -1)] * len(costs)
        for at, holders in enumerate(zip(*placement, strict=True)):
            hides = tuple([cost.hides_ns[at] for cost in costs])
            segment = self.reductions.segment(cuts[at], cuts[at + 1], holders, True, nobody, hides)
            for number, (tail, peer) in enumerate(segment.tails()):
                each = tail - costs[number].drain_ns[at], peer
                if each > found[number]:
                    found[number] = each
        return found

    def _reduced_ns(
        self, placement: Placement, costs: list[PipelineCost], ends: list[tuple[int, ...]]
    ) -> tuple[int, int]:
        """(when the last segment is reduced, the peer that holds it up) where cuts differ."""
        hides = [cost.hides_ns for cost in costs]
        found = self._segments(costs)
        alone = len(found) * len(costs) ** 2 <= MOST_PAIRS_DIVIDED
        return self.reductions.end_ns(
            [
                self.reductions.segment(
                    first,
                    end,
                    tuple(map(getitem, placement, stages)),
                    alone,
                    tuple(map(getitem, ends, stages)),
                    tuple(map(getitem, hides, stages)),
                )
                for first, end, stages in found
            ]
        )

    def _guarded(self, peers: tuple[int, ...], cost: PipelineCost) -> tuple[Guarded, ...]:
        self._work += 20 * len(peers)
        return self._guarding.by(peers, cost.cuts, cost.in_flight)

    def _guarded_ns(
        self, peers: tuple[int, ...], cost: PipelineCost, ends: tuple[int, ...], commit_ns: int
    ) -> int:
        """When the guardians of a lone pipeline have what they wait for; 0 without any."""
        guarded = waited_for(self._guarded(peers, cost), max(ends) + commit_ns)
        return self._guarding.last_receipt_ns(guarded, dict(zip(peers, ends, strict=True)))

    def _segments(self, costs: Sequence[PipelineCost]) -> tuple[CutSegment, ...]:
        found = self._segment_table.of(tuple([cost.cuts for cost in costs]))
        self._work += 2 * (len(found) + 1) * len(costs)
        return found

    def _commit_ns(self, placement: Placement) -> int:
        """Latency between the two stage holders that are farthest apart."""
        holders = tuple(sorted(peer for peers in placement for peer in peers))
        if len(holders) == 1:
            return 0
        farthest_ns = self.reductions.farthest_ns(holders)
        return farthest_ns + MESSAGE_NS + self.problem.ends_meet_ns(placement)


def _used(
    placement: Placement, costs: list[PipelineCost], dealt: tuple[int, ...]
) -> tuple[Placement, list[PipelineCost], tuple[int, ...]]:
    """The arguments without the pipelines that get no microbatch."""
    used = [index for index, count in enumerate(dealt) if count]
    return (
        tuple(placement[index] for index in used),
        [costs[index] for index in used],
        tuple(dealt[index] for index in used),
    )
