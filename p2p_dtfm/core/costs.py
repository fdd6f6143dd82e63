"""Predicted nanoseconds of a step for a placement of peers in pipelines.

    step = max over peers of (their segments' gradients ready + reduction) + commit

Pipelines compute side by side (`pipeline_cost`); microbatches are dealt so that the last to end
ends soonest. A segment's gradients are ready when the slowest of its holders has done its last
backward. Reduction: each of h holders owns 1/h of the segment, receives that part from all others
and sends it back summed, so each link carries 2/h of the segment's bytes and each peer sends
2 (h - 1)/h of them (Patarasuk and Yuan 2009: the least volume there is). Commit: one round trip
between the two stage holders that are farthest apart.
"""

import heapq
import itertools
from dataclasses import dataclass

from p2p_dtfm.core.pipeline_cost import PipelineCost, PipelineModel, held_bytes
from p2p_dtfm.core.problem import Problem, duration_ns

__all__ = ["PlacementCost", "StepModel", "deal_microbatches", "held_bytes"]

Placement = tuple[tuple[int, ...], ...]
"""Pipelines as ordered peer numbers."""


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

    @property
    def step_ns(self) -> int:
        return self.compute_ns + self.reduction_ns + self.commit_ns


class StepModel:
    """The cost model of one problem, with what it has worked out so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.pipelines = PipelineModel(problem)
        self._groups: dict[tuple[int, ...], tuple[int, int, int]] = {}
        self.work = 0
        """Peers and links looked at: the unit in which searches are bounded."""

    def cost(self, placement: Placement) -> PlacementCost | None:
        """Cost of a placement, without the pipelines that get no microbatch; None if none fits."""
        costs: list[PipelineCost] = []
        for peers in placement:
            self.work += len(peers)
            cost = self.pipelines.cost(peers)
            if cost is None:
                return None
            costs.append(cost)
        dealt = deal_microbatches(costs, self.problem.microbatch_count)
        if 0 in dealt:
            used = [index for index, count in enumerate(dealt) if count]
            placement = tuple(placement[index] for index in used)
            costs = [costs[index] for index in used]
            dealt = tuple(dealt[index] for index in used)
        ends = [cost.duration_ns(count) for cost, count in zip(costs, dealt, strict=True)]
        compute = max(ends)
        reduced = self._reduced_ns(placement, costs, ends)
        commit = self._farthest_round_trip_ns(placement)
        return PlacementCost(
            placement, tuple(costs), dealt, compute, max(0, reduced - compute), commit
        )

    def _reduced_ns(self, placement: Placement, costs: list[PipelineCost], ends: list[int]) -> int:
        """When the last peer has reduced its last segment."""
        if len(placement) == 1:
            return ends[0]
        edges = sorted({cut for cost in costs for cut in cost.cuts})
        at = [0] * len(placement)
        ready: dict[int, int] = {}
        busy: dict[int, int] = {}
        for first, end in itertools.pairwise(edges):
            for number, cost in enumerate(costs):
                while cost.cuts[at[number] + 1] <= first:
                    at[number] += 1
            holders = tuple(map(tuple.__getitem__, placement, at))
            start = max(e - c.drain_ns[s] for e, c, s in zip(ends, costs, at, strict=True))
            spent = self.reduction_ns(holders, first, end)
            for peer in holders:
                ready[peer] = max(start, ready.get(peer, 0))
                busy[peer] = busy.get(peer, 0) + spent
        return max(ready[peer] + busy[peer] for peer in ready)

    def reduction_ns(self, holders: tuple[int, ...], first: int, end: int) -> int:
        """Time to reduce the gradients of layers `first .. end - 1` among `holders`."""
        count = len(holders)
        if count == 1:
            return 0
        problem = self.problem
        blocks = min(end, problem.block_count + 1) - max(first, 1)
        size = blocks * problem.block.gradient_bytes
        size += problem.embedding.gradient_bytes if first == 0 else 0
        size += problem.head.gradient_bytes if end == problem.layer_count else 0
        part = 2 * -(-size // count)
        link, shared, latency = self._group(holders)
        return max(duration_ns(part, link), duration_ns(part * (count - 1), shared)) + 2 * latency

    def _group(self, holders: tuple[int, ...]) -> tuple[int, int, int]:
        """(slowest link, slowest uplink or downlink, longest latency) among holders."""
        found = self._groups.get(holders)
        if found is None:
            problem = self.problem
            self.work += len(holders) * len(holders)
            link = min(min(map(problem.bytes_per_s[a].__getitem__, holders)) for a in holders)
            shared = min(
                min(problem.uplink_bytes_per_s[a], problem.downlink_bytes_per_s[a]) for a in holders
            )
            latency = max(max(map(problem.latency_ns[a].__getitem__, holders)) for a in holders)
            if len(self._groups) > 1 << 16:
                self._groups.clear()
            found = self._groups[holders] = (link, shared, latency)
        return found

    def _farthest_round_trip_ns(self, placement: Placement) -> int:
        holders = tuple(sorted(peer for peers in placement for peer in peers))
        return 2 * self._group(holders)[2]


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
