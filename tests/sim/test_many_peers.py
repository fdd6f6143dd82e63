"""Views whose members speak with their neighbours only."""

from dataclasses import replace

import pytest

from p2p_dtfm.sim.faults.agreement_seeds import TIMING, run_seed

WIDE = replace(TIMING, wide_above=3)


@pytest.mark.parametrize("seed", [0, 1, 110])
def test_what_holds_under_faults_holds_along_the_overlay(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [*range(2, 60), 68, 144])
def test_the_same_of_many_seeds(seed: int) -> None:
    result = run_seed(seed, WIDE)
    assert not result.violation, "\n".join(result.story[-20:])
