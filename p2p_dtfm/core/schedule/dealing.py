"""How many microbatches each of several pipelines gets, so that the last pipeline ends soonest.

A pipeline ends its first microbatch after `fill_ns`, and each further one a `period_ns` later. A
search asks this for every placement, so most are dealt at once and only the rest one by one.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

_SCALE_BITS = 80
_FEW = 32
"""Among so few pipelines it is faster to look at all for the next one to end."""


class Dealt(NamedTuple):
    counts: tuple[int, ...]
    """The count of each pipeline; some may get none."""
    is_tied: bool
    """Whether another pipeline would have ended its next microbatch at the same time as the last
    one dealt. Then the order of the two decided which got it."""


def deal(fills_ns: Sequence[int], periods_ns: Sequence[int], count: int) -> Dealt:
    """Deals `count` microbatches among one or more pipelines."""
    if len(fills_ns) == 1:
        return Dealt((count,), False)
    counts = _at_once(fills_ns, periods_ns, count)
    left = count - sum(counts)
    if not left:
        return Dealt(tuple(counts), False)
    ends = [
        fill + own * period for fill, period, own in zip(fills_ns, periods_ns, counts, strict=True)
    ]
    if len(ends) > _FEW:
        return _one_by_one(ends, periods_ns, counts, left)
    last_ns = 0
    for _ in range(left):
        last_ns = min(ends)
        index = ends.index(last_ns)
        counts[index] += 1
        ends[index] += periods_ns[index]
    return Dealt(tuple(counts), min(ends) == last_ns)


def _one_by_one(ends: list[int], periods_ns: Sequence[int], counts: list[int], left: int) -> Dealt:
    queue = [(end, index) for index, end in enumerate(ends)]
    heapq.heapify(queue)
    last_ns = 0
    for _ in range(left):
        last_ns, index = queue[0]
        counts[index] += 1
        heapq.heapreplace(queue, (last_ns + periods_ns[index], index))
    return Dealt(tuple(counts), queue[0][0] == last_ns)


def _at_once(fills_ns: Sequence[int], periods_ns: Sequence[int], count: int) -> list[int]:
    """At most as many as each gets in the end: the solution in fractions, rounded down."""
    rates = [(1 << _SCALE_BITS) // period for period in periods_ns]
    lost = 0
    for fill, period, rate in zip(fills_ns, periods_ns, rates, strict=True):
        lost += (fill - period) * rate
    end_ns = ((count << _SCALE_BITS) + lost) // sum(rates)
    if max(fills_ns) > end_ns:
        return _among_the_soonest(fills_ns, periods_ns, rates, count, end_ns)
    counts = [(end_ns - fill) // period for fill, period in zip(fills_ns, periods_ns, strict=True)]
    return counts if sum(counts) <= count else [0] * len(fills_ns)


def _among_the_soonest(
    fills_ns: Sequence[int],
    periods_ns: Sequence[int],
    rates: Sequence[int],
    count: int,
    end_ns: int,
) -> list[int]:
    """The same without the pipelines that would not end their first microbatch by `end_ns`."""
    active = list(range(len(fills_ns)))
    while True:
        remaining = [index for index in active if fills_ns[index] <= end_ns]
        if len(remaining) == len(active) or not remaining:
            break
        active = remaining
        lost = sum((fills_ns[i] - periods_ns[i]) * rates[i] for i in active)
        end_ns = ((count << _SCALE_BITS) + lost) // sum(map(rates.__getitem__, active))
    counts = [0] * len(fills_ns)
    for index in active:
        counts[index] = max(0, (end_ns - fills_ns[index]) // periods_ns[index])
    return counts if sum(counts) <= count else [0] * len(fills_ns)
