"""Microbatches are dealt so that the last pipeline to end ends soonest, whatever their order."""

import random
from itertools import permutations

from p2p_dtfm.core.schedule.dealing import deal


def end_ns(fills: list[int], periods: list[int], counts: tuple[int, ...]) -> int:
    each = zip(fills, periods, counts, strict=True)
    return max(fill + (count - 1) * period for fill, period, count in each if count)


def drawn(seed: int) -> tuple[list[int], list[int], int]:
    draws = random.Random(seed)
    several = range(draws.randrange(1, 6))
    most = draws.choice([4, 100])  # of few numbers some are equal
    fills = [draws.randrange(1, most) * 1000 for _ in several]
    periods = [draws.randrange(1, most) * 1000 for _ in several]
    return fills, periods, draws.randrange(1, 20)


def test_all_are_dealt_and_the_order_matters_only_where_it_is_said() -> None:
    tied = 0
    for seed in range(300):
        fills, periods, count = drawn(seed)
        counts, is_tied = deal(fills, periods, count)
        assert sum(counts) == count
        tied += is_tied
        for order in permutations(range(len(fills))):
            pick = [fills[n] for n in order], [periods[n] for n in order]
            other = deal(*pick, count)
            assert end_ns(*pick, other.counts) == end_ns(fills, periods, counts)
            assert other.is_tied is is_tied
            if not is_tied:
                assert other.counts == tuple(counts[n] for n in order)
    assert 0 < tied < 300, "both are seen"


def test_many_pipelines_are_dealt_like_few() -> None:
    fills, periods = [1000 + n for n in range(40)], [700 + 3 * n for n in range(40)]
    counts, is_tied = deal(fills, periods, 100)
    assert not is_tied
    ends = [
        fill + count * period for fill, period, count in zip(fills, periods, counts, strict=True)
    ]
    assert min(ends) >= end_ns(fills, periods, counts), "nobody would end another one sooner"


def test_equal_pipelines_are_served_in_their_order() -> None:
    assert deal([5, 5, 5], [3, 3, 3], 4) == ((2, 1, 1), True)
    assert deal([5, 5, 5], [3, 3, 3], 6) == ((2, 2, 2), False)
