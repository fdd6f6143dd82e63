"""Predicted nanoseconds of a step for a placement of peers in pipelines.

    step = max over peers of (their segments' gradients ready + reduction) + commit

Pipelines compute side by side (`pipeline_cost`); microbatches are dealt so that the last to end
ends soonest. A segment's gradients are ready when the slowest of its holders has done its last
backward. Reduction: each holder owns a part of the segment (`shard_weights`), receives it from
all others and sends it back summed; with equal parts each of h peers sends 2 (h - 1)/h of the
segment, the least there is (Patarasuk and Yuan 2009). Commit: Prepared travels between the two
stage holders that are farthest apart.
"""

import heapq
import itertools
from dataclasses import dataclass
from operator import itemgetter

from p2p_dtfm.core.pipeline_cost import PipelineCost, PipelineModel, held_bytes
from p2p_dtfm.core.problem import MESSAGE_NS, Problem, duration_ns
from p2p_dtfm.core.shard_weights import shard_weights

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
        self._groups: dict[tuple[int, ...], tuple[int, int]] = {}
        self._farthest: dict[tuple[int, ...], int] = {}
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
        commit = self._commit_ns(placement)
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
        bytes_per_s, latency = self._group(holders)
        return duration_ns(size, bytes_per_s) + 2 * latency

    def _group(self, holders: tuple[int, ...]) -> tuple[int, int]:
        """(bytes of a segment reduced in a second, longest latency) among two or more holders."""
        key = tuple(sorted(holders))
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > 1 << 16:
                self._groups.clear()
            found = self._groups[key] = (self._reduced_bytes_per_s(key), self._longest_ns(key))
        return found

    def _reduced_bytes_per_s(self, holders: tuple[int, ...]) -> int:
        """The rate at which a segment goes through the shards, its slowest pair, or a limit.

        With h holders, a peer that owns the share w sends and receives 1 + (h - 2) w segments.
        """
        problem = self.problem
        count = len(holders)
        self.work += count * count
        pick = itemgetter(*holders)
        limits = [
            min(problem.uplink_bytes_per_s[a], problem.downlink_bytes_per_s[a]) for a in holders
        ]
        weights = shard_weights([pick(problem.pair_bytes_per_s[a]) for a in holders], limits)
        total = sum(weights)
        rate = total
        for weight, limit in zip(weights, limits, strict=True):
            rate = min(rate, limit * total // (total + (count - 2) * weight))
        return max(1, rate)

    def _longest_ns(self, holders: tuple[int, ...]) -> int:
        pick = itemgetter(*holders)
        longest: int = max(max(pick(self.problem.latency_ns[a])) for a in holders)
        return longest

    def _commit_ns(self, placement: Placement) -> int:
        """Latency between the two stage holders that are farthest apart."""
        holders = tuple(sorted(peer for peers in placement for peer in peers))
        if len(holders) == 1:
            return 0
        found = self._farthest.get(holders)
        if found is None:
            if len(self._farthest) > 1 << 12:
                self._farthest.clear()
            self.work += len(holders) * len(holders) // 8
            found = self._farthest[holders] = self._longest_ns(holders) + MESSAGE_NS
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
