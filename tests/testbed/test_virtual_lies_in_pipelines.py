"""Real daemons in virtual time in three pipelines of two stages, of which one lies: each stage has
two others that compute its work again, from what its neighbours have claimed to have sent it."""

import math

import pytest

from p2p_dtfm.testbed.virtual.seeds.faults import LIES, Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.playing import Played
from tests.testbed.pairs import planned_in_pairs

FIRSTS, LASTS = "ace", "bdf"
"""`a` and `b` are the first pair, through which one of the two held-out microbatches goes."""
STEPS = 12
LAST_S = 600.0


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(tmp_path_factory.mktemp("player"), STEPS)


def played(
    player: Player, monkeypatch: pytest.MonkeyPatch, liar: str, what: str, at_s: float = 1.0
) -> Played:
    planned_in_pairs(monkeypatch, LIES, FIRSTS, LASTS)
    fault = Fault(at_s, math.inf, "lie", (liar,), 0.0, what)
    begun = tuple(FIRSTS + LASTS)
    schedule = Schedule(begun, (), (fault,), is_audited=True, liars=(liar,), audit_rate=1.0)
    return player.play(LIES, schedule)


def test_evaluation_of_a_pipeline_is_computed_again(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or all would show the word of whoever holds the head."""
    found = played(player, monkeypatch, "b", "held-out", at_s=1.5)
    assert found.problem == "" and found.lies
