"""Which pipeline gets how many microbatches."""

import heapq
from collections.abc import Sequence

from p2p_dtfm.core.cost_model.pipeline_cost import PipelineCost


def split_microbatches(
    costs: list[PipelineCost], count: int, tails_ns: Sequence[int] = ()
) -> tuple[int, ...]:
    """Microbatches for each pipeline so that the last to end ends soonest; some may get none.

    `tails_ns`: for each pipeline, what follows on its end.
    """
    fills = [cost.fill_ns for cost in costs]
    if tails_ns:
        fills = list(map(int.__add__, fills, tails_ns))
    periods = [cost.period_ns for cost in costs]
    dealt = _dealt_at_once(fills, periods, count)
    queue = [
        (fill + own * period, index)
        for index, (fill, period, own) in enumerate(zip(fills, periods, dealt, strict=True))
    ]
    heapq.heapify(queue)
    for _ in range(count - sum(dealt)):
        end_ns, index = queue[0]
        dealt[index] += 1
        heapq.heapreplace(queue, (end_ns + periods[index], index))
    return tuple(dealt)


def _dealt_at_once(fills: list[int], periods: list[int], count: int) -> list[int]:
    """A little fewer than each gets in the end: the solution in fractions, rounded down."""
    active = list(range(len(fills)))
    while True:
        rates = {index: (1 << 80) // periods[index] for index in active}
        lost = sum((fills[i] - periods[i]) * rates[i] for i in active)
        end_ns = ((count << 80) + lost) // sum(rates.values())
        remaining = [index for index in active if fills[index] <= end_ns]
        if len(remaining) == len(active) or not remaining:
            break
        active = remaining
    dealt = [0] * len(fills)
    for index in active:
        dealt[index] = max(0, (end_ns - fills[index]) // periods[index])
    return dealt if sum(dealt) <= count else [0] * len(fills)
