"""How much of each segment of a plan each holder owns.

Where each peer has one segment, each segment is divided for itself (`shard_weights`). Where
replicas are cut differently, a peer has several segments side by side, on the same links. Then the
division that is best for one segment may load the same few peers in all of them, while the fair one
spreads. Both are added up over all segments; the one whose busiest link, uplink or downlink is done
sooner is taken.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S
from p2p_dtfm.core.schedule.shard_weights import fair_weights, shard_weights

MOST_PAIRS = 20_000
"""Pairs of holders over all segments that share links: with more, the fair division is taken."""

_SCALE = 1 << 40
Divided = tuple[tuple[int, ...], int]
"""The holders of a segment, and its bytes."""
Rate = Callable[[int, int], int]
Limit = Callable[[int], int]
Divide = Callable[[tuple[int, ...], bool], tuple[int, ...]]


def segment_weights(
    segments: Sequence[Divided], pair_rate: Rate, limit: Limit, divide: Divide | None = None
) -> list[tuple[int, ...]]:
    """Weights of each segment's two or more holders, in their order.

    `pair_rate(a, b)` is the slower direction in bytes/s, `limit(a)` the lesser of a's uplink and
    downlink, `UNLIMITED_BYTES_PER_S` if there is none. `divide` may remember what `divider` says.
    """
    divide = divide or divider(pair_rate, limit)
    everyone = [peer for holders, _ in segments for peer in holders]
    if len(set(everyone)) == len(everyone):
        return [divide(holders, True) for holders, _ in segments]
    fair = [divide(holders, False) for holders, _ in segments]
    if sum(len(holders) ** 2 for holders, _ in segments) > MOST_PAIRS:
        return fair
    best = [divide(holders, True) for holders, _ in segments]
    loads = [_busiest(segments, each, pair_rate, limit) for each in (fair, best)]
    return fair if loads[0] <= loads[1] else best


def divider(pair_rate: Rate, limit: Limit) -> Divide:
    """How a segment of these holders is divided: for itself (True), or fairly (False)."""

    def divide(holders: tuple[int, ...], alone: bool) -> tuple[int, ...]:
        pair = [[pair_rate(a, b) if a != b else 0 for b in holders] for a in holders]
        rule = shard_weights if alone else fair_weights
        return rule(pair, [limit(a) for a in holders])

    return divide


def _busiest(
    segments: Sequence[Divided],
    weights: Sequence[tuple[int, ...]],
    pair_rate: Rate,
    limit: Limit,
) -> int:
    """Time of the busiest pair or limit, if all segments begin at once."""
    busy: dict[tuple[int, int], int] = {}
    for (holders, size), parts in zip(segments, weights, strict=True):
        total, several = sum(parts), len(holders) - 2
        unit = size * _SCALE // total
        for at, (a, weight) in enumerate(zip(holders, parts, strict=True)):
            own = limit(a)
            if own < UNLIMITED_BYTES_PER_S:
                busy[a, a] = busy.get((a, a), 0) + unit * (total + several * weight) // own
            for b, other in zip(holders[:at], parts[:at], strict=True):
                key = (a, b) if a < b else (b, a)
                busy[key] = busy.get(key, 0) + unit * (weight + other) // pair_rate(a, b)
    return max(busy.values())
