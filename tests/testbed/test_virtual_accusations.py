"""Real daemons in virtual time: two colluders of eight say of one honest member that they do not
hear it, and then of the next one. The member has a link in doubt to both, and each of them only
one, so it went. Within six seconds all six honest members were out, and the two had the run for
themselves."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, with_lies

STEPS = 30
EIGHT = "abcdefgh"


@pytest.mark.parametrize("liars", ["gh", pytest.param("ab", marks=pytest.mark.nightly)])
def test_two_that_accuse_one_after_the_other_are_out_themselves(tmp_path: Path, liars: str) -> None:
    run = with_audits(make_run(tmp_path, STEPS), 0.02, 5)
    plays: list[Play] = []

    async def scene(swarm: Swarm) -> None:
        plays.append(
            await with_lies(swarm, run, lying_to_the_end("silence-of-one", EIGHT, liars, 0.02))
        )

    play(LIES, tmp_path / "world", scene)
    one = plays[0]
    assert one.lying.count
    honest = {peer.peer_id for peer in one.honest()}
    views: dict[int, set[str]] = {}
    for peer in one.honest():
        views |= {it["view"]: set(it["members"]) for it in peer.events() if it["event"] == "view"}
    assert min(len(honest & members) for members in views.values()) >= len(honest) - 2
    assert not views[max(views)] - honest, "in the end the liars are out"
