"""Views whose members speak with their neighbours only."""

from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.agreement import MANY_KIB, MANY_MESSAGES, MANY_ROUND_TRIPS, SCENARIO, run
from p2p_dtfm.sim.faults.agreement_seeds import TIMING, run_seed

WIDE = replace(TIMING, wide_above=3)


@pytest.mark.parametrize("seed", range(3))
def test_what_holds_under_faults_holds_along_the_overlay(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3, 60))
def test_the_same_of_many_seeds(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])


def _require_met(row: dict[str, object]) -> None:
    assert row["ok"], row
    limits = {"round_trips": MANY_ROUND_TRIPS, "kib_each": MANY_KIB, "messages_each": MANY_MESSAGES}
    assert all(row[name] <= limit for name, limit in limits.items()), row  # type: ignore[operator]


def test_more_than_64_found_a_run_and_let_one_in() -> None:
    for row in islice(run(SCENARIO, 80), 2):
        assert isinstance(row["peers"], int) and row["peers"] > 64
        _require_met(row)


@pytest.mark.nightly
def test_256_peers_around_the_world() -> None:
    """Founding, a join, a leave and a crash."""
    for row in islice(run(SCENARIO, 256), 4):
        _require_met(row)
