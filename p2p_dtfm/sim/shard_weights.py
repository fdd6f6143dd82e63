"""How large a part of a segment each holder owns, so that all links between holders are busy.

Holder a owns a fraction w_a of the segment. The link a -> b carries b's part of a's gradient and
then a's part of the sum, w_a + w_b of the segment, whichever way it goes; a peer's uplink and its
downlink each carry 1 + (h - 2) w_a of it among h holders. The slowest of these sets the time.

Writing v = w / time, every pair asks for v_a + v_b <= rate(a, b), and the time is 1 / sum(v). The
v grow together until a pair (or a peer's own limit) binds and stops its ends, while the others grow
on (max-min fair filling, Bertsekas and Gallager 1992, section 6.5.2). Among few holders it is then
tried whether the time falls if a holder owns nothing, so that its slow links carry half as much.
Integers only: every holder computes the same parts.
"""

import heapq
from collections.abc import Callable
from itertools import pairwise

SCALE_BITS = 20
"""Weights are in units of 2^-20 bytes/s, so that halves of small rates are not lost."""
TIME_BITS = 60
SEARCH_HOLDERS = 16
"""With more holders than this all of them own a part."""

Matrix = list[list[int]]


def shard_weights(
    holders: tuple[int, ...], rate: Callable[[int, int], int], limit: Callable[[int], int]
) -> tuple[int, ...]:
    """Weights of the holders' parts, of which at least one is positive.

    `rate(a, b)` is a directed link's in bytes/s, `limit(a)` the lesser of a's uplink and downlink.
    """
    pairs = [
        [min(rate(a, b), rate(b, a)) << SCALE_BITS if a != b else 0 for b in holders]
        for a in holders
    ]
    limits = [limit(a) << SCALE_BITS for a in holders]
    best = _filled(pairs, limits, frozenset())
    least = slowest(best, pairs, limits)
    idle: frozenset[int] = frozenset()
    improved = 1 < len(holders) <= SEARCH_HOLDERS
    while improved:
        improved = False
        base = idle
        for a in range(len(holders)):
            tried = base ^ {a}
            if len(tried) == len(holders):
                continue
            weights = _filled(pairs, limits, tried)
            time = slowest(weights, pairs, limits)
            if time < least:
                best, least, idle, improved = weights, time, tried, True
    return best


def slowest(weights: tuple[int, ...], pairs: Matrix, limits: list[int]) -> int:
    """Time for each byte of the segment, in units that only comparing needs."""
    total, count = sum(weights), len(weights)
    time = 0
    for a in range(count):
        carried = total + (count - 2) * weights[a]
        time = max(time, (carried << TIME_BITS) // (total * limits[a]))
        for b in range(a):
            carried = weights[a] + weights[b]
            time = max(time, (carried << TIME_BITS) // (total * pairs[a][b]))
    return time


def divide(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `size` in proportion to the weights; the parts add up to it."""
    total = sum(weights)
    edges, seen = [0], 0
    for weight in weights:
        seen += weight
        edges.append(size * seen // total)
    return tuple(after - before for before, after in pairwise(edges))


def _filled(pairs: Matrix, limits: list[int], idle: frozenset[int]) -> tuple[int, ...]:
    """Max-min fair v; those in `idle` stay at zero. A peer's own limit is that of equal parts."""
    count = len(pairs)
    values: list[int | None] = [0 if a in idle else None for a in range(count)]
    binding = [(limits[a] // (2 * (count - 1)), a, a) for a in range(count) if a not in idle]
    for a in range(count):
        for b in range(a):
            both = values[a] is None and values[b] is None
            if both or (a in idle) != (b in idle):
                binding.append((pairs[a][b] // 2 if both else pairs[a][b], a, b))
    heapq.heapify(binding)
    while binding:
        level, a, b = heapq.heappop(binding)
        first, second = values[a], values[b]
        if a == b or (first is None and second is None):
            values[a] = level if first is None else first
            values[b] = level if second is None else second
        elif first is None or second is None:
            stopped = second if first is None else first
            assert stopped is not None, "one of the two has stopped"
            growing = a if first is None else b
            if pairs[a][b] - stopped > level:
                heapq.heappush(binding, (pairs[a][b] - stopped, a, b))
            else:
                values[growing] = level
    return tuple(max(value or 0, 0 if a in idle else 1) for a, value in enumerate(values))
