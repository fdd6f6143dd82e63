"""Real daemons in virtual time, in pipelines of two stages: one that is drawn for a work of the
other stage tells whoever would audit that in its place what it has found, and the others that it
could not judge. These waited for that one, which waited for them: of six two honest ones were out
after ten seconds, one after the other, and nobody ever blamed the liar."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.lies.putting import put_in
from p2p_dtfm.testbed.virtual.seeds.faults import LIES
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end
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
        one = Play(swarm, run, schedule)
        with put_in(one.lying, schedule.lies):
            await one.play()
        assert one.lying.count
        honest = {peer.peer_id for peer in one.honest()}
        told = (event for peer in one.honest() for event in peer.events())
        seen = [set(event["members"]) for event in told if event["event"] == "view"]
        assert all(honest <= view for view in seen), [sorted(honest - view) for view in seen]

    play(LIES, tmp_path / "world", scene)
