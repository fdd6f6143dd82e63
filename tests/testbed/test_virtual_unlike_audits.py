"""Real daemons in virtual time, in pipelines of two stages: a liar is drawn for a work of the other
stage. It tells its result to the peers that would audit in its place, and tells the others that it
could not judge. These waited for the former, which waited for them. Of six members two honest ones
were out after ten seconds, one after the other, and nobody ever blamed the liar."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, views_with_all_honest, with_lies
from tests.testbed.pairs import planned_in_pairs

STEPS = 12
FIRSTS, LASTS = "ace", "bdf"


@pytest.mark.parametrize("liar", ["b", pytest.param("a", marks=pytest.mark.nightly)])
def test_who_tells_unlike_things_of_its_audit_costs_no_honest_one_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    planned_in_pairs(monkeypatch, LIES, FIRSTS, LASTS)
    run = with_audits(make_run(tmp_path, STEPS), 1.0, 5)
    schedule = lying_to_the_end("unlike-audits", FIRSTS + LASTS, liar, 1.0)

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, schedule)
        assert one.lying.count
        views_with_all_honest(one)

    play(LIES, tmp_path / "world", scene)
