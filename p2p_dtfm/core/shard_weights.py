"""How large a part of a segment each holder owns, so that all links between holders are busy.

Holder a owns a fraction w_a of the segment. The link a -> b carries b's part of a's gradient and
then a's part of the sum, w_a + w_b of the segment, whichever way it goes. With T the time per
byte of the segment, every pair asks for w_a + w_b <= T * rate(a, b). Writing v = w / T: the more
sum(v), the sooner all is done, subject to v_a + v_b <= rate(a, b).

The v grow together until a pair (or a peer's own limit) binds and stops an end, then the others
grow on: max-min fair filling (Bertsekas and Gallager 1992, section 6.5.2). Integers only, so that
every holder computes the same parts.
"""

from collections.abc import Sequence

MANY = 96


def shard_weights(pair: Sequence[Sequence[int]], limit: Sequence[int]) -> tuple[int, ...]:
    """Positive weights, one for each of two or more holders.

    `pair[a][b]` is the lower rate of the two directions in bytes/s; `limit[a]` the lesser of a's
    uplink and downlink. With h holders and equal parts that carries 2 (h - 1) of them, so a stops
    there. Time: h^2 log h; above `MANY` holders all growth stops at the first round.
    """
    count = len(limit)
    own = [max(1, each // (2 * (count - 1))) for each in limit]
    if count > MANY:
        return tuple(max(1, min(most, min(row) // 2)) for most, row in zip(own, pair, strict=True))
    shares = [
        sorted((rate // 2, b) for b, rate in enumerate(row) if b != a) for a, row in enumerate(pair)
    ]
    values = [0] * count
    frozen_room = list(own)
    at = [0] * count
    growing = list(range(count))
    room = [min(own[a], shares[a][0][0]) for a in growing]
    while growing:
        least = min(growing, key=lambda a: (room[a], a))
        value = values[least] = max(1, room[least])
        growing.remove(least)
        row = pair[least]
        for a in growing:
            left = row[a] - value
            if left < frozen_room[a]:
                frozen_room[a] = left
            shared = shares[a]
            while at[a] < count - 1 and values[shared[at[a]][1]]:
                at[a] += 1
            most = frozen_room[a]
            if at[a] < count - 1 and shared[at[a]][0] < most:
                most = shared[at[a]][0]
            room[a] = most if most > value else value
    return tuple(values)
