"""The parts of a segment that its holders own, by the planner's rule (`core.shard_weights`)."""

from collections.abc import Callable
from itertools import pairwise

from p2p_dtfm.core import shard_weights as rule


def shard_weights(
    holders: tuple[int, ...], rate: Callable[[int, int], int], limit: Callable[[int], int]
) -> tuple[int, ...]:
    """Positive weights, one for each of two or more holders.

    `rate(a, b)` is a directed link's in bytes/s, `limit(a)` the lesser of a's uplink and downlink.
    """
    pair = [[min(rate(a, b), rate(b, a)) if a != b else 0 for b in holders] for a in holders]
    return rule.shard_weights(pair, [limit(a) for a in holders])


def divide(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `size` in proportion to the weights; the parts add up to it."""
    total = sum(weights)
    edges, seen = [0], 0
    for weight in weights:
        seen += weight
        edges.append(size * seen // total)
    return tuple(after - before for before, after in pairwise(edges))
