"""Parts of a segment, sized for the links."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.sim.shard_weights import divide, shard_weights

UNLIMITED = 1 << 50


def slowest(weights: tuple[int, ...], rates: list[list[int]]) -> float:
    """Time per byte of the segment, set by the slowest pair."""
    total, count = sum(weights), len(weights)
    return max(
        (weights[a] + weights[b]) / total / min(rates[a][b], rates[b][a])
        for a in range(count)
        for b in range(a)
    )


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
            st.lists(st.integers(10_000, 10**9), min_size=n, max_size=n), min_size=n, max_size=n
        )
    )
)
def test_parts_are_never_worse_than_equal_ones(rates: list[list[int]]) -> None:
    count = len(rates)
    weights = shard_weights(tuple(range(count)), lambda a, b: rates[a][b], lambda a: UNLIMITED)
    assert min(weights) >= 1
    assert slowest(weights, rates) <= slowest((1,) * count, rates) * 1.001


@given(st.integers(0, 10**12), st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_parts_add_up(size: int, weights: list[int]) -> None:
    parts = divide(size, tuple(weights))
    assert sum(parts) == size
    total = sum(weights)
    assert all(abs(p - size * w / total) <= 1 for p, w in zip(parts, weights, strict=True))
