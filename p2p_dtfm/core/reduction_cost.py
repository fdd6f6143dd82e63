"""How long it takes to reduce the gradients of all segments.

Each holder owns a part of a segment (`segment_weights`), receives it from all others and sends it
back summed; with equal parts each of h peers sends 2 (h - 1)/h of the segment, the least there is
(Patarasuk and Yuan 2009). A segment starts when the slowest of its holders has done its last
backward and takes as long as its busiest pair of holders or its busiest uplink or downlink.
Where replicas are cut differently a peer has several segments side by side; then the time of every
pair, uplink and downlink is added up over the segments that use it.
"""

from dataclasses import dataclass
from operator import itemgetter

from p2p_dtfm.core.problem import UNLIMITED_BYTES_PER_S, Problem, duration_ns
from p2p_dtfm.core.shard_weights import MANY, fair_weights, shard_weights

_GIBIBYTE = 1 << 30
_LIGHT = 16
"""Pairs with less than 1/16 of the load of the busiest are not added up."""
MOST_LOADS = 40_000
"""Where more would have to be added up, a peer's segments count as if one followed another."""


@dataclass(slots=True)
class Group:
    """A set of holders, sorted, of any segment."""

    holders: tuple[int, ...]
    weights: tuple[int, ...]
    bytes_per_s: int
    """Of a segment, through its busiest pair or limit."""
    latency_ns: int
    """Between the two that are farthest apart."""
    weakest: int
    """The holder that holds up the others most."""
    loads: tuple[tuple[int, int], ...] | None = None
    """(a * peers + b, ns for each GiB of a segment) of a pair, or of a's own limit where a = b."""


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """A segment to be reduced."""

    group: Group
    size_bytes: int
    start_ns: int

    @property
    def spent_ns(self) -> int:
        return duration_ns(self.size_bytes, self.group.bytes_per_s) + 2 * self.group.latency_ns


class ReductionModel:
    """Times reductions among peers of one problem, and remembers what it knows of their groups."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.work = 0
        self._groups: dict[tuple[tuple[int, ...], bool], Group] = {}

    def segment_bytes(self, first: int, end: int) -> int:
        """Gradients of the layers `first .. end - 1`."""
        problem = self.problem
        blocks = min(end, problem.block_count + 1) - max(first, 1)
        size = blocks * problem.block.gradient_bytes
        size += problem.embedding.gradient_bytes if first == 0 else 0
        size += problem.head.gradient_bytes if end == problem.layer_count else 0
        return size

    def group(self, holders: tuple[int, ...], alone: bool) -> Group:
        """What is known of two or more holders. `alone`: none of them has another segment."""
        key = tuple(sorted(holders)), alone
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > 1 << 15:
                self._groups.clear()
            found = self._groups[key] = self._new_group(*key)
        return found

    def end_ns(self, segments: list[SegmentCost], aligned: bool) -> tuple[int, int]:
        """(when all are reduced, the holder that holds up the longest); at least one segment.

        `aligned`: no peer has two segments.
        """
        longest = max(segments, key=lambda segment: segment.spent_ns)
        end = max(segment.start_ns + segment.spent_ns for segment in segments)
        if not aligned:
            if sum(len(s.group.holders) ** 2 for s in segments) // 2 > MOST_LOADS:
                end = max(end, self._one_after_another_ns(segments))
            else:
                end = max(end, self._side_by_side_ns(segments))
        return end, longest.group.weakest

    def _one_after_another_ns(self, segments: list[SegmentCost]) -> int:
        ready: dict[int, int] = {}
        busy: dict[int, int] = {}
        for segment in segments:
            for peer in segment.group.holders:
                ready[peer] = max(ready.get(peer, 0), segment.start_ns)
                busy[peer] = busy.get(peer, 0) + segment.spent_ns
        return max(ready[peer] + busy[peer] for peer in ready)

    def _side_by_side_ns(self, segments: list[SegmentCost]) -> int:
        busy: dict[int, int] = {}
        ready: dict[int, int] = {}
        for segment in segments:
            size, start = segment.size_bytes, segment.start_ns
            loads = self._loads(segment.group)
            self.work += len(loads) // 4
            for key, each_ns in loads:
                busy[key] = busy.get(key, 0) + (each_ns * size >> 30)
                if start > ready.get(key, 0):
                    ready[key] = start
        latency = max(segment.group.latency_ns for segment in segments)
        return max(map(int.__add__, busy.values(), map(ready.__getitem__, busy))) + 2 * latency

    def _new_group(self, holders: tuple[int, ...], alone: bool) -> Group:
        """With h holders, one that owns the share w sends and receives 1 + (h - 2) w segments."""
        problem = self.problem
        count = len(holders)
        pick = itemgetter(*holders)
        limits = [self.limit(a) for a in holders]
        self.work += count * count // (2 if count <= MANY else 16)
        if alone:
            spent = 20 + 2 * count * count if count <= MANY else count * count // 16
            self.work += spent if min(limits) >= UNLIMITED_BYTES_PER_S else 2 * spent
        divide = shard_weights if alone else fair_weights
        weights = divide([pick(problem.pair_bytes_per_s[a]) for a in holders], limits)
        total = sum(weights)
        rates = [
            limit * total // (total + (count - 2) * weight)
            for weight, limit in zip(weights, limits, strict=True)
        ]
        rate = min(rates)
        weakest = rates.index(rate) if rate < total else weights.index(min(weights))
        return Group(
            holders,
            weights,
            max(1, min(rate, total)),
            self.longest_latency_ns(holders),
            holders[weakest],
        )

    def _loads(self, group: Group) -> tuple[tuple[int, int], ...]:
        if group.loads is None:
            group.loads = self._new_loads(group)
        return group.loads

    def _new_loads(self, group: Group) -> tuple[tuple[int, int], ...]:
        problem = self.problem
        count, total = problem.peer_count, sum(group.weights)
        several = len(group.holders) - 2
        light_ns = duration_ns(_GIBIBYTE, group.bytes_per_s) // _LIGHT
        self.work += len(group.holders) ** 2 // 4
        loads: list[tuple[int, int]] = []
        for at, (a, weight) in enumerate(zip(group.holders, group.weights, strict=True)):
            limit = self.limit(a)
            if limit < UNLIMITED_BYTES_PER_S:
                part = _GIBIBYTE * (total + several * weight) // total
                loads.append((a * count + a, duration_ns(part, limit)))
            row = problem.pair_bytes_per_s[a]
            for b, other in zip(group.holders[:at], group.weights[:at], strict=True):
                part = _GIBIBYTE * (weight + other) // total
                loads.append((b * count + a, duration_ns(part, row[b])))
        return tuple(load for load in loads if load[1] >= light_ns)

    def limit(self, peer: int) -> int:
        """The lesser of a peer's uplink and downlink."""
        problem = self.problem
        return min(problem.uplink_bytes_per_s[peer], problem.downlink_bytes_per_s[peer])

    def longest_latency_ns(self, holders: tuple[int, ...]) -> int:
        """One way, among two or more peers."""
        pick = itemgetter(*holders)
        longest: int = max(max(pick(self.problem.latency_ns[a])) for a in holders)
        return longest
