"""When all gradients are reduced, link by link: for the few placements that are left to choose.

`reduction_cost` adds up what a pair of holders exchanges. Here each directed link carries what it
is given, first come first served. That is a holder's gradients of one piece after another, from
when each is whole; and between them the sums of its own parts, from when the first chunk of all
gradients is in. The result is within 0.9% of the simulator where links have rates of their own. A
shared uplink or downlink carries gradients before sums, and what it carries counts as through only
when all beside it is: mostly up to 4% off.

This takes peers^2 additions for each segment, against one look-up in `reduction_cost`.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns
from p2p_dtfm.core.virtual.exchange import chunk_count


@dataclass(frozen=True, slots=True)
class Reduction:
    """A segment, or a piece of one: who holds it, how much of it each holder owns, its bytes."""

    holders: tuple[int, ...]
    weights: tuple[int, ...]
    size_bytes: int
    below_ns: tuple[int, ...] = ()
    """How long before the end of its last part (`PipelineModel.last_part_ns`) each holder can send
    its gradient; empty: none before the end."""

    def part_bytes(self) -> list[int]:
        total = sum(self.weights)
        return [self.size_bytes * weight // total for weight in self.weights]


def reduced_ns(
    problem: PlanningProblem, segments: Sequence[Reduction], ready_ns: dict[int, int]
) -> int:
    """When the last holder has the last sum. Each segment has two or more holders."""
    timing = _Timing(problem, ready_ns)
    for segment in sorted(segments, key=timing.last_ready_ns):
        timing.exchange(segment)
    return timing.end_ns()


class _BusyLine:
    """What a link, an uplink or a downlink has carried, and what waits for its turn."""

    __slots__ = ("busy_ns", "waiting")

    def __init__(self) -> None:
        self.busy_ns = 0
        self.waiting: deque[tuple[int, int]] = deque()
        """(from when it can be sent, how long that takes)."""

    def carry(self, start: int, duration: int) -> int:
        """When a message is sent that comes after all that could be sent before `start`."""
        waiting, busy = self.waiting, self.busy_ns
        while waiting and waiting[0][0] <= start:
            since, spent = waiting.popleft()
            busy = (busy if busy > since else since) + spent
        self.busy_ns = (busy if busy > start else start) + duration
        return self.busy_ns

    def first(self, start: int, duration: int) -> int:
        """When a message is sent that goes before all that waits."""
        self.busy_ns = max(self.busy_ns, start) + duration
        return self.busy_ns

    def end_ns(self) -> int:
        """When all that waits is sent."""
        busy = self.busy_ns
        for since, spent in self.waiting:
            busy = (busy if busy > since else since) + spent
        return busy


class _Timing:
    def __init__(self, problem: PlanningProblem, ready_ns: dict[int, int]) -> None:
        self.problem = problem
        self.ready_ns = ready_ns
        self.links: dict[tuple[int, int], _BusyLine] = {}
        self.uplinks = self._limited(problem.links.uplink_bytes_per_s)
        self.downlinks = self._limited(problem.links.downlink_bytes_per_s)
        self._last_chunks_ns = 0
        self._known_ns: dict[tuple[int, int], int] = {}

    def _limited(self, rates: tuple[int, ...]) -> dict[int, _BusyLine]:
        return {p: _BusyLine() for p in self.ready_ns if rates[p] < UNLIMITED_BYTES_PER_S}

    def last_ready_ns(self, segment: Reduction) -> int:
        return max(self._ready_of(segment).values())

    def _ready_of(self, segment: Reduction) -> dict[int, int]:
        below = segment.below_ns or (0,) * len(segment.holders)
        return {
            peer: self.ready_ns[peer] - early
            for peer, early in zip(segment.holders, below, strict=True)
        }

    def exchange(self, segment: Reduction) -> None:
        """Adds a segment's exchange. It must be called in the order in which segments' last holders
        are ready."""
        pairs = list(zip(segment.holders, segment.part_bytes(), strict=True))
        ready = self._ready_of(segment)
        begun, came = dict(ready), dict(ready)  # first and last chunk of all gradients for a part
        for peer, own in sorted(pairs, key=lambda pair: ready[pair[0]]):
            for other, part, there in self._sent_gradients(peer, own, pairs, ready[peer]):
                came[other] = max(came[other], there)
                spent = self._sent_ns(part, self.problem.links.bytes_per_s[peer][other])
                begun[other] = max(begun[other], there - spent + spent // chunk_count(part))
        for peer, own in pairs:
            self._send_sums(peer, own, pairs, begun, came[peer])

    def _sent_gradients(
        self, peer: int, own: int, pairs: list[tuple[int, int]], start: int
    ) -> Iterator[tuple[int, int, int]]:
        """(receiver, bytes, time of arrival) for each gradient that a holder sends."""
        problem, links, downlinks = self.problem, self.links, self.downlinks
        rates, latencies = problem.links.bytes_per_s[peer], problem.links.latency_ns[peer]
        up_ns = 0
        if peer in self.uplinks:
            sent = sum(part for _, part in pairs) - own
            spent = duration_ns(sent, problem.links.uplink_bytes_per_s[peer])
            up_ns = self.uplinks[peer].first(start, spent)
        for other, part in pairs:
            if other == peer:
                continue
            line = links.get((peer, other))
            if line is None:
                line = links[peer, other] = _BusyLine()
            there = max(up_ns, line.carry(start, self._sent_ns(part, rates[other])))
            there += latencies[other]
            if other in downlinks:
                spent = duration_ns(part, problem.links.downlink_bytes_per_s[other])
                there = max(there, downlinks[other].first(start, spent))
            yield other, part, there

    def _send_sums(
        self, peer: int, own: int, pairs: list[tuple[int, int]], begun: dict[int, int], came: int
    ) -> None:
        problem, since, chunks = self.problem, begun[peer], chunk_count(own)
        rates, latencies = problem.links.bytes_per_s[peer], problem.links.latency_ns[peer]
        if peer in self.uplinks:
            spent = duration_ns((len(pairs) - 1) * own, problem.links.uplink_bytes_per_s[peer])
            self.uplinks[peer].waiting.append((since, spent))
        if peer in self.downlinks:
            others = sum(part for _, part in pairs) - own
            spent = duration_ns(others, problem.links.downlink_bytes_per_s[peer])
            self.downlinks[peer].waiting.append((max(begun.values()), spent))
        last = came
        for other, _ in pairs:
            if other != peer:
                spent = self._sent_ns(own, rates[other])
                self.links[peer, other].waiting.append((since, spent))
                last = max(last, came + spent // chunks + latencies[other])
        self._last_chunks_ns = max(self._last_chunks_ns, last)

    def end_ns(self) -> int:
        """When all sums have arrived."""
        latency, uplinks = self.problem.links.latency_ns, self.uplinks
        up_ns = {peer: line.end_ns() for peer, line in uplinks.items()}
        links = (
            max(line.end_ns(), up_ns.get(peer, 0)) + latency[peer][other]
            for (peer, other), line in self.links.items()
        )
        downlinks = (line.end_ns() for line in self.downlinks.values())
        return max(self._last_chunks_ns, *links, *downlinks)

    def _sent_ns(self, part_bytes: int, bytes_per_s: int) -> int:
        key = part_bytes, bytes_per_s
        found = self._known_ns.get(key)
        if found is None:
            handled = chunk_count(part_bytes) * MESSAGE_NS if part_bytes else 0
            found = self._known_ns[key] = duration_ns(part_bytes, bytes_per_s) + handled
        return found
