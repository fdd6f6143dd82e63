"""How long it takes to reduce the gradients of all segments.

Each holder owns a part of a segment (`segment_weights`), receives it from all others and sends it
back summed. With equal parts each of h peers sends 2 (h - 1)/h of the segment, the least possible
(Patarasuk and Yuan 2009). A segment starts when the slowest of its holders has done its last
backward. It takes as long as its busiest pair of holders, or its busiest uplink or downlink. Where
replicas are cut differently, a peer has several segments side by side. Then the time of every pair,
uplink and downlink is added up over the segments that use it.
"""

from dataclasses import dataclass
from itertools import accumulate
from operator import floordiv, itemgetter
from typing import NamedTuple

from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.schedule.pieces import PIECE_ELEMENTS_EACH
from p2p_dtfm.core.schedule.shard_weights import EXACT_HOLDERS_LIMIT, fair_weights, shard_weights

_GIBIBYTE = 1 << 30
_GIBIBYTE_SECONDS = _GIBIBYTE * 1_000_000_000
_SCALE = 1 << 40
_LIGHT = 16
"""Pairs with less than 1/16 of the load of the busiest are not added up."""
MOST_LOADS = 40_000
"""Where more would have to be added up, a peer's segments count as if one followed another."""


@dataclass(slots=True)
class Group:
    """What is known of a set of holders, sorted, whichever segment they hold."""

    holders: tuple[int, ...]
    weights: tuple[int, ...]
    bytes_per_s: int
    """The rate of a segment through its busiest pair or limit."""
    latency_ns: int
    """Latency between the two holders that are farthest apart."""
    weakest: int
    """The holder that holds up the others most."""
    times_ns: tuple[dict[int, int], int] | None = None
    """For each GiB of a segment: how long each holder's busiest pair, or its own limit, is busy;
    and how long the sums alone take through the pair or limit that is slowest for them. None until
    a segment of these holders is timed."""
    loads: tuple[tuple[int, int], ...] | None = None
    """(a * peers + b, ns for each GiB of a segment) of a pair, or of a's own limit where a = b."""


_Groups = dict[tuple[int, ...], Group]


class SegmentCost(NamedTuple):
    """A segment to be reduced. Tuples are parallel to `holders`, which are those of the group."""

    group: Group
    size_bytes: int
    low_bytes: int
    """Bytes of the piece that is whole only when the last backward ends."""
    holders: tuple[int, ...]
    ready_ns: tuple[int, ...]
    """When each holder's last backward ends."""
    hides_ns: tuple[int, ...]
    """How long before that the first piece is whole."""

    @property
    def spent_ns(self) -> int:
        return duration_ns(self.size_bytes, self.group.bytes_per_s) + 2 * self.group.latency_ns

    def tails(self) -> list[tuple[int, int]]:
        """For each holder: how long after it is ready the last sum may arrive because of it; and
        which peer that is due to: the holder, or the one that is slowest in sending sums."""
        group, size, low = self.group, self.size_bytes, self.low_bytes
        assert group.times_ns is not None, "known once there is a segment"
        (each, sums), hops, weakest = group.times_ns, 2 * group.latency_ns, group.weakest
        tails = []
        for peer, hidden in zip(self.holders, self.hides_ns, strict=True):
            busy = each[peer]
            if busy < sums:
                busy, peer = sums, weakest
            whole, last = (busy * size >> 30) - hidden, busy * low >> 30
            tails.append(((whole if whole > last else last) + hops, peer))
        return tails


class ReductionModel:
    """Times reductions among peers of one problem, and remembers what it knows of their groups."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.work = self.first_work = 0
        """All work, and the part of it that is not done again when the same comes again."""
        self.forgotten = 0
        """How often results were dropped whose work would be counted once more."""
        layers = map(problem.layers.of, range(problem.layer_count))
        self._block_elements = problem.layers.block.gradient_elements
        self._farthest: dict[tuple[int, ...], int] = {}
        self._bytes_below = [0, *accumulate(layer.gradient_bytes for layer in layers)]
        self._groups: dict[tuple[tuple[int, ...], bool], Group] = {}
        self._in_order: tuple[_Groups, _Groups] = ({}, {})
        """`_groups` by holders as they are asked for: of segments that share links, and others."""
        links, count = problem.links, problem.peer_count
        self._limits = tuple(map(min, links.uplink_bytes_per_s, links.downlink_bytes_per_s))
        self._pairs = [divmod(key, count) for key in range(count * count)]

    def segment_bytes(self, first: int, end: int) -> int:
        """Gradient bytes of the layers `first .. end - 1`."""
        return self._bytes_below[end] - self._bytes_below[first]

    def segment(
        self,
        first: int,
        end: int,
        holders: tuple[int, ...],
        alone: bool,
        ready: tuple[int, ...],
        hides: tuple[int, ...],
    ) -> SegmentCost:
        """The cost of the layers `first .. end - 1`. Layers that are too small travel together, and
        none of them early."""
        group = self.group(holders, alone)
        if group.times_ns is None:
            group.times_ns = self._times_ns(group)
        size = low = self._bytes_below[end] - self._bytes_below[first]
        if self._block_elements < len(holders) * PIECE_ELEMENTS_EACH:
            hides = (0,) * len(holders)
        else:
            low = self._bytes_below[first + 1] - self._bytes_below[first]
        return SegmentCost(group, size, low, holders, ready, hides)

    def group(self, holders: tuple[int, ...], alone: bool) -> Group:
        """What is known of two or more holders. `alone`: none of them has another segment."""
        known = self._in_order[alone]
        found = known.get(holders)
        if found is None:
            if len(known) > 1 << 16:
                known.clear()
            found = known[holders] = self._sorted_group(tuple(sorted(holders)), alone)
        return found

    def _sorted_group(self, holders: tuple[int, ...], alone: bool) -> Group:
        key = holders, alone
        found = self._groups.get(key)
        if found is None:
            if len(self._groups) > 1 << 15:
                self._groups.clear()
                for known in self._in_order:
                    known.clear()
                self.forgotten += 1
            before = self.work
            found = self._groups[key] = self._new_group(*key)
            self.first_work += self.work - before
        return found

    def end_ns(self, segments: list[SegmentCost]) -> tuple[int, int]:
        """(when all segments are reduced, the holder that holds up the last one). There is at least
        one segment; peers may have several."""
        end, critical = 0, -1
        for segment in segments:
            for ready, (tail, peer) in zip(segment.ready_ns, segment.tails(), strict=True):
                tail += ready
                if tail > end or (tail == end and peer > critical):
                    end, critical = tail, peer
        if sum([len(s.holders) ** 2 for s in segments]) // 2 > MOST_LOADS:
            return max(end, self._one_after_another_ns(segments)), critical
        return max(end, self._side_by_side_ns(segments)), critical

    def _one_after_another_ns(self, segments: list[SegmentCost]) -> int:
        ready: dict[int, int] = {}
        busy: dict[int, int] = {}
        for segment in segments:
            start, spent = max(segment.ready_ns), segment.spent_ns
            for peer in segment.holders:
                ready[peer] = max(ready.get(peer, 0), start)
                busy[peer] = busy.get(peer, 0) + spent
        return max(ready[peer] + busy[peer] for peer in ready)

    def _side_by_side_ns(self, segments: list[SegmentCost]) -> int:
        busy: dict[int, int] = {}
        ready = [0] * self.problem.peer_count
        latency = 0
        for group, size, _, holders, ready_ns, hides_ns in segments:
            for peer, start, hidden in zip(holders, ready_ns, hides_ns, strict=True):
                if start - hidden > ready[peer]:
                    ready[peer] = start - hidden
            if group.latency_ns > latency:
                latency = group.latency_ns
            loads = self._loads(group)
            self.work += len(loads) // 4
            for key, each_ns in loads:
                spent = each_ns * size >> 30
                busy[key] = busy[key] + spent if key in busy else spent
        last = 0
        pairs = self._pairs
        for key, busy_ns in busy.items():
            one, other = pairs[key]
            end = busy_ns + (ready[one] if ready[one] > ready[other] else ready[other])
            if end > last:
                last = end
        return 2 * latency + last

    def _new_group(self, holders: tuple[int, ...], alone: bool) -> Group:
        """A new group. With h holders, one that owns the share w sends and receives 1 + (h - 2) w
        of a segment."""
        problem = self.problem
        count = len(holders)
        pick = itemgetter(*holders)
        limits = [self._limits[a] for a in holders]
        self.work += count * count // (2 if count <= EXACT_HOLDERS_LIMIT else 16)
        if alone:
            spent = 10 + count * count // 4 if count <= EXACT_HOLDERS_LIMIT else count * count // 16
            self.work += spent if min(limits) >= UNLIMITED_BYTES_PER_S else 2 * spent
        divide = shard_weights if alone else fair_weights
        weights = divide([pick(problem.links.pair_bytes_per_s[a]) for a in holders], limits)
        total = sum(weights)
        rates = [
            limit * total // (total + (count - 2) * weight)
            for weight, limit in zip(weights, limits, strict=True)
        ]
        rate = min(rates)
        weakest = rates.index(rate) if rate < total else weights.index(min(weights))
        rate = max(1, min(rate, total))
        latency_ns = self.longest_latency_ns(holders)
        return Group(holders, weights, rate, latency_ns, holders[weakest])

    def _times_ns(self, group: Group) -> tuple[dict[int, int], int]:
        """`times_ns` of a group. In large groups pairs are not looked at, and each holder counts as
        being as busy as the busiest."""
        holders, weights = group.holders, group.weights
        count, total = len(holders), sum(weights)
        if count > EXACT_HOLDERS_LIMIT:
            longest = duration_ns(_GIBIBYTE, group.bytes_per_s)
            return dict.fromkeys(holders, longest), longest
        pick = itemgetter(*holders)
        busiest: list[int] = []
        scaled = [weight * _SCALE for weight in weights]
        sums = 0
        for at, (peer, weight) in enumerate(zip(holders, weights, strict=True)):
            rates = list(pick(self.problem.links.pair_bytes_per_s[peer]))
            rates[at] = UNLIMITED_BYTES_PER_S
            mine = scaled[at]
            pairs = max(map(floordiv, map(mine.__add__, scaled), rates))
            limit = self._limits[peer]
            own = (total + (count - 2) * weight) * _SCALE // limit
            busiest.append(max(pairs, own))
            most = max((count - 1) * weight, total - weight)
            sums = max(sums, mine // min(rates), most * _SCALE // limit)
        times = [value * _GIBIBYTE_SECONDS // total // _SCALE for value in (*busiest, sums)]
        return dict(zip(holders, times, strict=False)), times[-1]

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
        self.first_work += len(group.holders) ** 2 // 4
        loads: list[tuple[int, int]] = []
        heaviest = max(group.weights)
        for at, (a, weight) in enumerate(zip(group.holders, group.weights, strict=True)):
            limit = self._limits[a]
            if limit < UNLIMITED_BYTES_PER_S:
                part = _GIBIBYTE * (total + several * weight) // total
                if (each_ns := duration_ns(part, limit)) >= light_ns:
                    loads.append((a * count + a, each_ns))
            row = problem.links.pair_bytes_per_s[a]
            most = _GIBIBYTE * (weight + heaviest) // total
            fast = -(-most * 1_000_000_000 // (light_ns - 1)) if light_ns > 1 else 1 << 60
            before = zip(group.holders[:at], group.weights[:at], strict=True)
            # most pairs are light, whatever the other holder owns: skip them
            for b, other in [each for each in before if row[each[0]] < fast]:
                part = _GIBIBYTE * (weight + other) // total
                if (each_ns := duration_ns(part, row[b])) >= light_ns:
                    loads.append((b * count + a, each_ns))
        return tuple(loads)

    def limit(self, peer: int) -> int:
        """The lesser of a peer's uplink and downlink."""
        return self._limits[peer]

    def farthest_ns(self, holders: tuple[int, ...]) -> int:
        """`longest_latency_ns` of all stage-holders, sorted."""
        found = self._farthest.get(holders)
        if found is None:
            if len(self._farthest) > 1 << 12:
                self._farthest.clear()
                self.forgotten += 1
            self.work += len(holders) * len(holders) // 8
            self.first_work += len(holders) * len(holders) // 8
            found = self._farthest[holders] = self.longest_latency_ns(holders)
        return found

    def longest_latency_ns(self, holders: tuple[int, ...]) -> int:
        """The longest latency one way among two or more peers."""
        pick, longest = itemgetter(*holders), 0
        farthest_ns = self.problem.links.farthest_ns
        for a in sorted(holders, key=farthest_ns.__getitem__, reverse=True):
            if farthest_ns[a] <= longest:
                break
            longest = max(longest, *pick(self.problem.links.latency_ns[a]))
        return longest
