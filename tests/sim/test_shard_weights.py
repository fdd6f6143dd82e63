"""Parts of a segment, sized for the links."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.sim.shard_weights import divide, shard_weights, slowest

UNLIMITED = 1 << 50


def test_equal_links_get_equal_parts() -> None:
    weights = shard_weights((4, 7, 9), lambda a, b: 1000, lambda a: UNLIMITED)
    assert len(set(weights)) == 1


def test_a_peer_behind_a_slow_uplink_owns_little() -> None:
    weights = shard_weights(
        (0, 1, 2, 3), lambda a, b: 10**8, lambda a: 10**6 if a == 2 else UNLIMITED
    )
    assert weights[2] < min(weights[0], weights[1], weights[3]) // 50


@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(1, 10**9), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_parts_are_never_worse_than_equal_ones(rates: list[list[int]]) -> None:
    count = len(rates)
    weights = shard_weights(tuple(range(count)), lambda a, b: rates[a][b], lambda a: UNLIMITED)
    assert min(weights) >= 0
    pairs = [[min(rates[a][b], rates[b][a]) for b in range(count)] for a in range(count)]
    limits = [UNLIMITED] * count
    assert slowest(weights, pairs, limits) <= slowest((1,) * count, pairs, limits) * 1.0001


def test_a_holder_whose_links_are_all_slow_owns_nothing() -> None:
    # far's three links carry only the others' parts then, 100 bytes/s each instead of 50 and 50
    weights = shard_weights(
        (0, 1, 2, 3), lambda a, b: 100 if 3 in (a, b) else 1000, lambda a: UNLIMITED
    )
    assert weights[3] == 0
    assert len(set(weights[:3])) == 1


@given(st.integers(0, 10**12), st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_parts_add_up(size: int, weights: list[int]) -> None:
    parts = divide(size, tuple(weights))
    assert sum(parts) == size
    assert all(
        abs(part - size * w / sum(weights)) <= 1 for part, w in zip(parts, weights, strict=True)
    )
