"""Real daemons in virtual time: one opens one thing to half of the others and another to the rest,
in the first step of a view, where nobody has committed itself to anything. Each half drew others,
waited for them, and had honest ones out."""

import math

import pytest

from p2p_dtfm.testbed.virtual.seeds.faults import LIES, Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.player import Player

STEPS = 10


@pytest.mark.parametrize(
    "seed", [LIES, *(pytest.param(LIES + n, marks=pytest.mark.nightly) for n in range(1, 6))]
)
def test_who_opens_one_thing_to_some_is_out_by_its_own_signatures(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    fault = Fault(1.0, math.inf, "lie", ("d",), 0.0, "unlike-openings")
    schedule = Schedule(tuple("abcd"), (), (fault,), is_audited=True, liars=("d",))
    played = Player(tmp_path_factory.mktemp("player"), STEPS).play(seed, schedule)
    assert played.problem == "" and played.lies
    told = "\n".join(played.reports)
    assert "has claimed one thing to some" in told
