"""When all gradients are reduced, link by link: for the few placements that are left to choose.

`reduction_cost` lets a segment wait for its slowest holder. But a holder whose pipeline ends early
sends its gradient at once, and only the sums wait for the last one. So here each directed link,
each uplink and each downlink carries gradients from when their sender is ready, and then sums, in
the order of the segments, from when the segment's last holder is ready:

    link a -> b:  max(ready_a + gradients_ab, ready of the segment's last) + sums_ab + latency
    sums of a:    not before the last gradient for a's part came in, but for their last chunk

It takes peers^2 additions for each segment, against one look-up there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from p2p_dtfm.core.exchange import chunk_count
from p2p_dtfm.core.problem import MESSAGE_NS, UNLIMITED_BYTES_PER_S, Problem, duration_ns


@dataclass(frozen=True, slots=True)
class Reduction:
    """A segment, or a piece of one: who holds it, how much of it each holder owns, its bytes."""

    holders: tuple[int, ...]
    weights: tuple[int, ...]
    size_bytes: int
    below_ns: tuple[int, ...] = ()
    """How long before the end of its last part (`PipelineModel.last_part_ns`) each holder can send
    its gradient; none: not before the end."""

    def part_bytes(self) -> list[int]:
        total = sum(self.weights)
        return [self.size_bytes * weight // total for weight in self.weights]


def reduced_ns(problem: Problem, segments: Sequence[Reduction], ready_ns: dict[int, int]) -> int:
    """When the last holder has the last sum. Segments have two or more holders each."""
    timing = _Timing(problem, ready_ns)
    for segment in segments:
        timing.gradients(segment)
    end = 0
    for segment in sorted(segments, key=timing.last_ready_ns):
        end = max(end, timing.sums(segment))
    return end


class _Timing:
    """Until when each link, uplink and downlink is busy."""

    def __init__(self, problem: Problem, ready_ns: dict[int, int]) -> None:
        self.problem = problem
        self.ready_ns = ready_ns
        self.links: dict[tuple[int, int], int] = {}
        self.uplinks: dict[int, int] = {}
        self.downlinks: dict[int, int] = {}
        self._known_ns: dict[tuple[int, int], int] = {}

    def last_ready_ns(self, segment: Reduction) -> int:
        return max(self._ready_of(segment).values())

    def _ready_of(self, segment: Reduction) -> dict[int, int]:
        below = segment.below_ns or (0,) * len(segment.holders)
        return {
            peer: self.ready_ns[peer] - early
            for peer, early in zip(segment.holders, below, strict=True)
        }

    def gradients(self, segment: Reduction) -> None:
        problem, parts = self.problem, segment.part_bytes()
        everything = sum(parts)
        pairs = list(zip(segment.holders, parts, strict=True))
        ready = self._ready_of(segment)
        for a, own in sorted(pairs, key=lambda pair: ready[pair[0]]):
            start = ready[a]
            rates = problem.bytes_per_s[a]
            self._carry(self.uplinks, problem.uplink_bytes_per_s, a, everything - own, start)
            for b, part in pairs:
                if a != b:
                    busy = max(self.links.get((a, b), 0), start)
                    self.links[a, b] = busy + self._sent_ns(part, rates[b])
                    self._carry(self.downlinks, problem.downlink_bytes_per_s, b, part, start)

    def sums(self, segment: Reduction) -> int:
        """Called in the order in which segments' last holders are ready."""
        problem, parts = self.problem, segment.part_bytes()
        everything, others = sum(parts), len(parts) - 1
        start, end = self.last_ready_ns(segment), 0
        came = {
            b: max(
                max(self.links[a, b], self.uplinks.get(a, 0)) + problem.latency_ns[a][b]
                for a in segment.holders
                if a != b
            )
            for b in segment.holders
        }
        for a, own in zip(segment.holders, parts, strict=True):
            self._carry(self.uplinks, problem.uplink_bytes_per_s, a, others * own, start)
            self._carry(self.downlinks, problem.downlink_bytes_per_s, a, everything - own, start)
        for a, own in zip(segment.holders, parts, strict=True):
            rates, latencies = problem.bytes_per_s[a], problem.latency_ns[a]
            came_in = max(came[a], self.downlinks.get(a, 0))
            chunks = chunk_count(own)
            for b in segment.holders:
                if a == b:
                    continue
                sums = self._sent_ns(own, rates[b])
                busy = max(self.links[a, b], start) + sums
                self.links[a, b] = busy
                last = max(busy, came[a] + sums // chunks, self.uplinks.get(a, 0))
                end = max(end, last + latencies[b])
            end = max(end, came_in)
        return end

    def _sent_ns(self, part_bytes: int, bytes_per_s: int) -> int:
        key = part_bytes, bytes_per_s
        found = self._known_ns.get(key)
        if found is None:
            handled = chunk_count(part_bytes) * MESSAGE_NS if part_bytes else 0
            found = self._known_ns[key] = duration_ns(part_bytes, bytes_per_s) + handled
        return found

    def _carry(
        self, busy: dict[int, int], rates: tuple[int, ...], peer: int, size: int, start: int
    ) -> None:
        if rates[peer] < UNLIMITED_BYTES_PER_S:
            busy[peer] = max(busy.get(peer, 0), start) + duration_ns(size, rates[peer])
