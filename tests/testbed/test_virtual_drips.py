"""Real daemons in virtual time: one member claims honestly, two seconds after it could, in each
step."""

import math

import pytest

from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule

STEPS = 20
FEW = 16
"""Steps in which most of the time passes, and what is noticed late."""


@pytest.mark.parametrize(
    ("members", "liars", "rate"),
    [
        pytest.param("abcd", "d", 0.02, marks=pytest.mark.nightly),
        ("abcd", "d", 1.0),
        pytest.param("abcdefgh", "gh", 0.02, marks=pytest.mark.nightly),
    ],
)
def test_who_has_the_others_wait_for_its_word_in_each_step_is_out(
    tmp_path_factory: pytest.TempPathFactory, members: str, liars: str, rate: float
) -> None:
    """The member was never late enough for a fault: steps took ten times as long for good."""
    faults = tuple(Fault(1.0, math.inf, "lie", (name,), 0.0, "drip") for name in liars)
    schedule = Schedule(
        tuple(members), (), faults, is_audited=True, liars=tuple(liars), audit_rate=rate
    )
    played = Player(tmp_path_factory.mktemp("player"), STEPS).play(LIES, schedule)
    assert played.problem == "" and 0 < played.lies <= FEW * len(liars)
