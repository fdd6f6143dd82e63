"""On random swarms our plan is, as simulated, no slower than any alternative's."""

import pytest

from benchmarks.placement import compared


@pytest.mark.parametrize("seed", [19, 68])
def test_no_alternative_is_faster(seed: int) -> None:
    row = compared(seed)
    assert row is not None
    assert set(row["ratios"]) == {"region", "paper", "random", "greedy"}
    assert max(row["ratios"].values()) <= 1.002
    assert 0.95 < row["predicted_over_simulated"] < 1.05
