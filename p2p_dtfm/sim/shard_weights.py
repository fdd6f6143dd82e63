"""How large a part of a segment each holder owns, so that all links between holders are busy.

Holder a owns a fraction w_a of the segment. The link a -> b carries b's part of a's gradient and
then a's part of the sum, w_a + w_b of the segment, whichever way it goes. With T the time per
byte of the segment, every pair asks for w_a + w_b <= T * rate(a, b). Writing v = w / T: the more
sum(v), the sooner all is done, subject to v_a + v_b <= rate(a, b).

The v grow together until a pair (or a peer's own limit) binds and stops its two ends, then the
others grow on: max-min fair filling (Bertsekas and Gallager 1992, section 6.5.2), which is within
a factor of two of the best sum since every pair that binds holds at least half of what its ends
could have. Integers only, so that every holder computes the same parts.
"""

import itertools
from collections.abc import Callable

Rate = Callable[[int, int], int]


def shard_weights(
    holders: tuple[int, ...], rate: Rate, limit: Callable[[int], int]
) -> tuple[int, ...]:
    """Positive weights, one for each holder.

    `rate(a, b)` is a directed link's in bytes/s. `limit(a)` is the lesser of a's uplink and
    downlink; with h holders and equal parts it carries 2 (h - 1) of them, so a stops there.
    """
    count = len(holders)
    pair = [[min(rate(a, b), rate(b, a)) if a != b else 0 for b in holders] for a in holders]
    own = [max(1, limit(a) // (2 * (count - 1))) for a in holders]
    values = [0] * count
    growing = list(range(count))
    room = [min([own[a], *(pair[a][b] // 2 for b in range(count) if b != a)]) for a in range(count)]
    while growing:
        least = min(growing, key=lambda a: (room[a], a))
        values[least] = max(1, room[least])
        growing.remove(least)
        for a in growing:
            # what the stopped end leaves of this pair, and half of what growing pairs share
            left = max(values[least], pair[a][least] - values[least])
            frozen = [b for b in range(count) if b != a and values[b]]
            room[a] = min(
                [own[a], left]
                + [pair[a][b] - values[b] for b in frozen]
                + [pair[a][b] // 2 for b in growing if b != a]
            )
            room[a] = max(values[least], room[a])
    return tuple(values)


def divide(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `size` in proportion to the weights; the parts add up to it."""
    total = sum(weights)
    edges, seen = [0], 0
    for weight in weights:
        seen += weight
        edges.append(size * seen // total)
    return tuple(after - before for before, after in itertools.pairwise(edges))
