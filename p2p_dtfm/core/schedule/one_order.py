"""One order of all microbatches of a step, where some peers compute for more than one pipeline.

Each stage computes its microbatches in this order, so no two stages wait for each other.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile

from p2p_dtfm.core.protocol.plan import Plan

_ONE = 1 << 20


def merged(
    plan: Plan, lists: Sequence[Sequence[int]], forwarded: Mapping[str, Sequence[int]]
) -> tuple[int, ...]:
    """One order of all microbatches, which keeps the order within each pipeline.

    A peer with several places computes first what it has `forwarded`, so that it keeps that work.
    Where two such peers contradict each other, the later one gives way. Otherwise all pipelines
    advance alike.
    """
    pipeline_of = {number: n for n, numbers in enumerate(lists) for number in numbers}
    serves = {peer: {n for n, _ in plan.places_of(peer)} for peer in sorted(plan.stand_ins)}
    first = {
        peer: deque(_from(forwarded[peer], own, pipeline_of))
        for peer, own in serves.items()
        if peer in forwarded
    }
    waiting = [deque(numbers) for numbers in lists]
    order: list[int] = []
    while any(waiting):
        held_back = set().union(*(_held_back(first[p], waiting, serves[p]) for p in first))
        free = [n for n, numbers in enumerate(waiting) if numbers and n not in held_back]
        if not free:
            first[max(peer for peer, numbers in first.items() if numbers)].clear()
            continue
        after = {n: (len(lists[n]) - len(waiting[n])) * _ONE // len(lists[n]) for n in free}
        order.append(waiting[min(free, key=lambda n: (after[n], n))].popleft())
        _go_on(first.values(), order[-1])
    return tuple(order)


def _go_on(first: Iterable[deque[int]], number: int) -> None:
    for numbers in first:
        if numbers and numbers[0] == number:
            numbers.popleft()


def _held_back(
    first: Sequence[int], waiting: Sequence[Sequence[int]], pipelines: set[int]
) -> set[int]:
    """Those of a peer's `pipelines` whose next microbatch is not the one it must compute first."""
    if not first:
        return set()
    return {n for n in pipelines if waiting[n] and waiting[n][0] != first[0]}


def _from(
    numbers: Sequence[int], pipelines: set[int], pipeline_of: Mapping[int, int]
) -> Iterator[int]:
    """The first microbatches, as far as they are of these pipelines."""
    return takewhile(lambda number: pipeline_of.get(number) in pipelines, numbers)
