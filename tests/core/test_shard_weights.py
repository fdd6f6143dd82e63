"""Parts of a segment, sized for the links of its holders."""

from fractions import Fraction
from importlib.util import find_spec

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S as UNLIMITED
from p2p_dtfm.core.cost_model.segment_weights import segment_weights
from p2p_dtfm.core.schedule.pieces import divide
from p2p_dtfm.core.schedule.shard_weights import fair_weights, shard_weights

Table = list[list[int]]

needs_compiled_weights = pytest.mark.skipif(
    find_spec("p2p_dtfm.core.schedule._weights") is None,
    reason="no C compiler when this was installed",
)


def symmetric(table: Table) -> Table:
    count = len(table)
    return [[min(table[a][b], table[b][a]) for b in range(count)] for a in range(count)]


def time_per_byte(weights: tuple[int, ...], pair: Table, limit: list[int]) -> Fraction:
    """The time for a byte of the segment: the busiest pair sets it, or the limit of one holder."""
    total, count = sum(weights), len(weights)
    pairs = max(
        Fraction(weights[a] + weights[b], total * pair[a][b])
        for a in range(count)
        for b in range(a)
    )
    several = count - 2
    limits = max(
        Fraction(total + several * weight, total * each)
        for weight, each in zip(weights, limit, strict=True)
    )
    return max(pairs, limits)


rates = st.integers(10_000, 10**9)
groups = st.integers(2, 9).flatmap(
    lambda n: st.tuples(
        st.lists(st.lists(rates, min_size=n, max_size=n), min_size=n, max_size=n).map(symmetric),
        st.one_of(
            st.just([UNLIMITED] * n), st.lists(rates, min_size=n, max_size=n)
        ),
    )
)  # fmt: skip


def test_equal_links_get_equal_parts() -> None:
    for rule in (fair_weights, shard_weights):
        assert len(set(rule([[1000] * 3] * 3, [UNLIMITED] * 3))) == 1


def test_beside_one_that_is_slow_to_everybody_the_others_own_all() -> None:
    """With equal parts every slow link carries 2/8 of the segment; with these weights it carries
    1/7."""
    pair = [[10**6 if 0 in (a, b) else 10**9 for b in range(8)] for a in range(8)]
    weights = shard_weights(pair, [UNLIMITED] * 8)
    assert weights[0] * 1000 < sum(weights)
    best = time_per_byte(weights, pair, [UNLIMITED] * 8)
    fair = time_per_byte(fair_weights(pair, [UNLIMITED] * 8), pair, [UNLIMITED] * 8)
    assert abs(best / Fraction(1, 7 * 10**6) - 1) < Fraction(1, 1000)
    assert fair > best * Fraction(17, 10)


def test_who_has_a_slow_uplink_only_sends_its_own_gradient() -> None:
    pair = [[10**8] * 4 for _ in range(4)]
    limit = [UNLIMITED, UNLIMITED, 10**6, UNLIMITED]
    weights = shard_weights(pair, limit)
    assert weights[2] * 100 < sum(weights)
    assert time_per_byte(weights, pair, limit) < Fraction(102, 100 * 10**6)


@given(groups)
def test_parts_are_never_worse_than_fair_ones_nor_than_equal_ones(
    group: tuple[Table, list[int]],
) -> None:
    pair, limit = group
    equal = (1,) * len(limit)
    fair, best = fair_weights(pair, limit), shard_weights(pair, limit)
    assert min(fair) >= 1 and min(best) >= 1
    slack = Fraction(1001, 1000)
    best_time = time_per_byte(best, pair, limit)
    assert best_time <= slack * time_per_byte(fair, pair, limit)
    assert best_time <= slack * time_per_byte(equal, pair, limit)


@given(groups, st.integers(1, 10**9))
def test_who_has_one_segment_divides_it_for_itself(
    group: tuple[Table, list[int]], size: int
) -> None:
    pair, limit = group
    holders = tuple(range(len(limit)))
    found = segment_weights([(holders, size)], lambda a, b: pair[a][b], limit.__getitem__)
    assert found == [shard_weights(pair, limit)]


def test_segments_side_by_side_do_not_all_load_the_same_links() -> None:
    """Peer 0 is slow to everybody. Alone, each segment would be owned by the others. The pair 1-2
    is in both segments and only a little faster, so fair parts end sooner there."""
    pair = [[1000 if 0 in (a, b) else 1500 for b in range(5)] for a in range(5)]
    segments = [((0, 1, 2), 1000), ((0, 1, 2, 3), 1000), ((1, 2, 4), 3000)]
    found = segment_weights(segments, lambda a, b: pair[a][b], lambda a: UNLIMITED)

    def rows(holders: tuple[int, ...]) -> Table:
        return [[pair[a][b] for b in holders] for a in holders]

    sides = {
        rule: [rule(rows(holders), [UNLIMITED] * len(holders)) for holders, _ in segments]
        for rule in (fair_weights, shard_weights)
    }

    def busiest(weights: list[tuple[int, ...]]) -> Fraction:
        load: dict[tuple[int, int], Fraction] = {}
        for (holders, size), parts in zip(segments, weights, strict=True):
            for x, a in enumerate(holders):
                for y, b in enumerate(holders[:x]):
                    bytes_ = Fraction(size * (parts[x] + parts[y]), sum(parts))
                    load[b, a] = load.get((b, a), Fraction(0)) + bytes_ / pair[a][b]
        return max(load.values())

    assert busiest(found) == min(map(busiest, sides.values()))
    assert found in sides.values()


large_groups = st.integers(2, 66).flatmap(
    lambda n: st.tuples(
        st.randoms(use_true_random=False).map(
            lambda chance: symmetric(
                [[chance.choice((1, 10**4, chance.randint(1, 10**9), UNLIMITED))
                  for _ in range(n)] for _ in range(n)]
            )
        ),
        st.lists(st.sampled_from((1, 10**4, 2 * 10**7, 10**9, UNLIMITED)), min_size=n, max_size=n),
    )
)  # fmt: skip


@needs_compiled_weights
@given(st.one_of(groups, large_groups))
def test_the_compiled_twin_gives_equal_parts(group: tuple[Table, list[int]]) -> None:
    """The compiled twin takes up to 64 holders; more are left to the other."""
    pair, limit = group
    assert shard_weights(pair, limit) == shard_weights(pair, limit, compiled=False)
    assert fair_weights(pair, limit) == fair_weights(pair, limit, compiled=False)


@needs_compiled_weights
@pytest.mark.parametrize("rate", [0, -1, UNLIMITED + 1, 1 << 70])
def test_the_compiled_twin_leaves_what_it_cannot_count_to_the_other(rate: int) -> None:
    from p2p_dtfm.core.schedule import _weights

    assert _weights.shard_weights([[0, rate], [rate, 0]], [UNLIMITED] * 2) is None
    assert _weights.shard_weights([[0, 1], [1, 0]], [UNLIMITED, rate]) is None
    assert _weights.shard_weights([[0, 1], [1, 0]], [1, 2, 3]) is None
    with pytest.raises(TypeError):
        _weights.shard_weights([[0, "1"], [1, 0]], [1, 1])


@given(st.integers(0, 10**12), st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_parts_add_up(size: int, weights: list[int]) -> None:
    parts = divide(size, tuple(weights))
    assert sum(parts) == size
    total = sum(weights)
    assert all(abs(p - size * w / total) <= 1 for p, w in zip(parts, weights, strict=True))
