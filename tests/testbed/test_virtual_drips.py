"""Real daemons in virtual time: one claims honestly, two seconds after it could, in each step."""

import math

import pytest

from p2p_dtfm.testbed.virtual.seeds.faults import LIES, Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.player import Player

STEPS = 32
FEW = 16
"""Steps in which most of the time goes by, and what is noticed late."""


def test_who_has_the_others_wait_for_its_word_in_each_step_is_out(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """It was never late enough to be a fault: steps took ten times as long for good."""
    fault = Fault(1.0, math.inf, "lie", ("d",), 0.0, "drip")
    schedule = Schedule(tuple("abcd"), (), (fault,), is_audited=True, liars=("d",), audit_rate=0.02)
    played = Player(tmp_path_factory.mktemp("player"), STEPS).play(LIES, schedule)
    assert played.problem == "" and 0 < played.lies <= FEW
