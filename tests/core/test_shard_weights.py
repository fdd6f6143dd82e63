"""The planner's shards are those of the simulator, and no pair is asked for more than it has."""

from hypothesis import given
from hypothesis import strategies as st

from p2p_dtfm.core.shard_weights import shard_weights
from p2p_dtfm.sim.shard_weights import shard_weights as simulated

rates = st.integers(2, 1 << 40)


@given(
    st.integers(2, 7).flatmap(
        lambda n: st.tuples(
            st.lists(st.lists(rates, min_size=n, max_size=n), min_size=n, max_size=n),
            st.lists(rates, min_size=n, max_size=n),
        )
    )
)
def test_equal_to_the_simulators(drawn: tuple[list[list[int]], list[int]]) -> None:
    table, limits = drawn
    count = len(limits)
    pair = [[min(table[a][b], table[b][a]) for b in range(count)] for a in range(count)]
    weights = shard_weights(pair, limits)
    assert weights == simulated(tuple(range(count)), lambda a, b: table[a][b], lambda a: limits[a])
