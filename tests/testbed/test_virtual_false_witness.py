"""Real daemons in virtual time: a member says in its Prepared that it has heard a claim that nobody
has signed. All refused that Prepared, and waited for another for six seconds. The member went on
alone, was let in at once, and did so again: the others stood still nearly all of the time."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, with_lies

STEPS = 20
SOON_S = 2.0
FIRST_WAIT_S = 9.0
"""The member may ask again after ten seconds."""


@pytest.mark.parametrize(
    ("members", "liars"),
    [("abcd", "d"), pytest.param("abcdefgh", "gh", marks=pytest.mark.nightly)],
)
def test_who_says_what_nobody_has_signed_is_out_at_once_and_not_let_in_at_once(
    tmp_path: Path, members: str, liars: str
) -> None:
    run = with_audits(make_run(tmp_path, STEPS), 1.0, 5)
    schedule = lying_to_the_end("false-witness", members, liars, 1.0)

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, schedule)
        honest = {peer.peer_id for peer in one.honest()}
        for peer in one.honest():
            views = [event for event in peer.events() if event["event"] == "view"]
            began_s, members = views[0]["at_s"], [set(it["members"]) for it in views]
            assert all(honest <= each for each in members)
            out_s = next(it["at_s"] for it in views if set(it["members"]) == honest)
            assert out_s - began_s < SOON_S
            soon = [it for it in views if out_s < it["at_s"] < out_s + FIRST_WAIT_S]
            assert all(set(it["members"]) == honest for it in soon)

    play(LIES, tmp_path / "world", scene)
