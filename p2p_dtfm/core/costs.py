"""Predicted nanoseconds of a step for a placement of peers in pipelines.

    step = max over peers of (their segments' gradients ready + reduction) + commit

Pipelines compute side by side (`pipeline_cost`); microbatches are dealt so that the last to end
ends soonest. Reduction: `reduction_cost`. Commit: Prepared travels between the two stage holders
that are farthest apart.
"""

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from p2p_dtfm.core.pipeline_cost import PipelineCost, PipelineModel, held_bytes
from p2p_dtfm.core.problem import MESSAGE_NS, Problem
from p2p_dtfm.core.reduction_cost import ReductionModel, SegmentCost
from p2p_dtfm.core.reduction_timing import Reduction, reduced_ns

__all__ = ["PlacementCost", "StepModel", "deal_microbatches", "held_bytes"]

Placement = tuple[tuple[int, ...], ...]
"""Pipelines as ordered peer numbers."""

MOST_PAIRS = 60_000
"""Of holders, over all segments: with more of them no reduction is timed link by link."""


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """What a placement costs; the tuples are parallel to `placement`."""

    placement: Placement
    pipelines: tuple[PipelineCost, ...]
    microbatches: tuple[int, ...]
    compute_ns: int
    """Until the last backward of the slowest pipeline."""
    reduction_ns: int
    """From then until every segment is reduced."""
    commit_ns: int
    critical: int
    """A peer that holds up the reduction; -1 if there is none."""

    @property
    def step_ns(self) -> int:
        return self.compute_ns + self.reduction_ns + self.commit_ns


class StepModel:
    """The cost model of one problem, with what it has worked out so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pipelines = PipelineModel(problem)
        self.reductions = ReductionModel(problem)
        self._farthest: dict[tuple[int, ...], int] = {}
        self._work = 0

    @property
    def work(self) -> int:
        """Of searching, in about microseconds; what bounds a search."""
        return self._work + self.reductions.work

    def spend(self, work: int) -> None:
        """Count work done elsewhere."""
        self._work += work

    def cost(self, placement: Placement, bound_ns: int | None = None) -> PlacementCost | None:
        """Cost of a placement, without the pipelines that get no microbatch.

        None if a pipeline does not fit, or if the step surely takes longer than `bound_ns`.
        """
        costs: list[PipelineCost] = []
        self._work += 10 + 4 * len(placement)
        for peers in placement:
            cost, fresh = self.pipelines.cost(peers)
            self._work += 40 * len(peers) if fresh else 0
            if cost is None:
                return None
            costs.append(cost)
        return self.combine(placement, costs, bound_ns)

    def combine(
        self, placement: Placement, costs: list[PipelineCost], bound_ns: int | None
    ) -> PlacementCost | None:
        """Deal microbatches to pipelines that are already timed, reduce and commit."""
        dealt = deal_microbatches(costs, self.problem.microbatch_count)
        return self.dealt(placement, costs, dealt, bound_ns)

    def dealt(
        self,
        placement: Placement,
        costs: list[PipelineCost],
        dealt: tuple[int, ...],
        bound_ns: int | None = None,
    ) -> PlacementCost | None:
        """With so many microbatches for each pipeline; without those that get none."""
        if 0 in dealt:
            used = [index for index, count in enumerate(dealt) if count]
            placement = tuple(placement[index] for index in used)
            costs = [costs[index] for index in used]
            dealt = tuple(dealt[index] for index in used)
        ends = [cost.duration_ns(count) for cost, count in zip(costs, dealt, strict=True)]
        compute = max(ends)
        if bound_ns is not None and compute > bound_ns:
            return None
        reduced, critical = self._reduced_ns(placement, costs, ends)
        commit = self._commit_ns(placement)
        return PlacementCost(
            placement, tuple(costs), dealt, compute, max(0, reduced - compute), commit, critical
        )

    def refined(self, cost: PlacementCost) -> PlacementCost:
        """The same with its reduction timed link by link (`reduction_timing`), if that is cheap."""
        pipelines = list(cost.pipelines)
        dealt = zip(pipelines, cost.microbatches, strict=True)
        ends = [pipeline.duration_ns(count) for pipeline, count in dealt]
        if len(cost.placement) == 1:
            return cost
        segments: list[Reduction] = []
        for first, end, holders, _ in self._segments(cost.placement, pipelines):
            group = self.reductions.group(holders)
            size = self.reductions.segment_bytes(first, end)
            segments.append(Reduction(group.holders, group.weights, size))
        if sum(len(segment.holders) ** 2 for segment in segments) > MOST_PAIRS:
            return cost
        ready = {
            peer: end - pipeline.drain_ns[stage]
            for peers, pipeline, end in zip(cost.placement, pipelines, ends, strict=True)
            for stage, peer in enumerate(peers)
        }
        reduced = reduced_ns(self.problem, segments, ready)
        return replace(cost, reduction_ns=max(0, reduced - cost.compute_ns))

    def _reduced_ns(
        self, placement: Placement, costs: list[PipelineCost], ends: list[int]
    ) -> tuple[int, int]:
        """(when the last segment is reduced, the peer that holds up the longest one)."""
        if len(placement) == 1:
            return ends[0], -1
        segments: list[SegmentCost] = []
        for first, end, holders, stages in self._segments(placement, costs):
            start = max(e - c.drain_ns[s] for e, c, s in zip(ends, costs, stages, strict=True))
            size = self.reductions.segment_bytes(first, end)
            segments.append(SegmentCost(self.reductions.group(holders), size, start))
        aligned = all(len(cost.cuts) == len(segments) + 1 for cost in costs)
        return self.reductions.end_ns(segments, aligned)

    def _segments(
        self, placement: Placement, costs: list[PipelineCost]
    ) -> Iterator[tuple[int, int, tuple[int, ...], list[int]]]:
        """(first layer, end, holder in each pipeline, its stage); the list is used again."""
        edges = sorted({cut for cost in costs for cut in cost.cuts})
        self._work += 2 * len(edges) * len(costs)
        at = [0] * len(placement)
        for first, end in itertools.pairwise(edges):
            for number, cost in enumerate(costs):
                if cost.cuts[at[number] + 1] <= first:
                    at[number] += 1
            yield first, end, tuple(map(tuple.__getitem__, placement, at)), at

    def _commit_ns(self, placement: Placement) -> int:
        """Latency between the two stage holders that are farthest apart."""
        holders = tuple(sorted(peer for peers in placement for peer in peers))
        if len(holders) == 1:
            return 0
        found = self._farthest.get(holders)
        if found is None:
            if len(self._farthest) > 1 << 12:
                self._farthest.clear()
            self._work += len(holders) * len(holders) // 8
            found = self._farthest[holders] = (
                self.reductions.longest_latency_ns(holders) + MESSAGE_NS
            )
        return found


def deal_microbatches(costs: list[PipelineCost], count: int) -> tuple[int, ...]:
    """Microbatches for each pipeline so that the last to end ends soonest; some may get none."""
    dealt = _dealt_at_once(costs, count)
    queue = [(cost.duration_ns(dealt[index] + 1), index) for index, cost in enumerate(costs)]
    heapq.heapify(queue)
    for _ in range(count - sum(dealt)):
        _, index = queue[0]
        dealt[index] += 1
        heapq.heapreplace(queue, (costs[index].duration_ns(dealt[index] + 1), index))
    return tuple(dealt)


def _dealt_at_once(costs: list[PipelineCost], count: int) -> list[int]:
    """A little fewer than each gets in the end: the solution in fractions, rounded down."""
    active = list(range(len(costs)))
    while True:
        rates = {index: (1 << 80) // costs[index].period_ns for index in active}
        lost = sum((costs[i].fill_ns - costs[i].period_ns) * rates[i] for i in active)
        end_ns = ((count << 80) + lost) // sum(rates.values())
        remaining = [index for index in active if costs[index].fill_ns <= end_ns]
        if len(remaining) == len(active) or not remaining:
            break
        active = remaining
    dealt = [0] * len(costs)
    for index in active:
        cost = costs[index]
        dealt[index] = max(0, (end_ns - cost.fill_ns) // cost.period_ns)
    return dealt if sum(dealt) <= count else [0] * len(costs)
