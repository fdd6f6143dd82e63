"""Real daemons in virtual time: an auditor says for ever that it lacks a part that an honest member
has claimed, and asks that member for nothing. The others followed it to the member that it names,
which could not say that it was never asked. Of four members one honest member after the other was
out, and the liar never. Now the named member accuses the liar, and of two in doubt the one in doubt
again goes first."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.daemon.trainer.audited.recomputing import Recomputing
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import lying_to_the_end, of_single_sequences, with_lies

STEPS = 8


def _lack_a_part_of_others(lie: Lie) -> None:
    """In place of any work that the liar is to compute again, it lacks a part of the first honest
    member."""
    honest = Recomputing.work_of

    async def work_of(self: Any, here: Any, peer_id: str) -> bytes:
        if not lie.is_told(here.step):
            return await honest(self, here, peer_id)
        me = self._tools.me
        others = [it for it in sorted(here.plan.stage_holders()) if it not in (me, *lie.colluders)]
        for layer, chunks in here.engine.mailbox.wire.chunks.items():
            owners = enumerate(chunks.owners)
            chunk = next(number for number, owner in owners if owner not in (me, others[0]))
            self._asked._due[Lack(others[0], Kind.PART, layer, chunk)] += 1
        try:
            await self._state.until_over(here.view)
        finally:
            self._asked._due.clear()

    in_words.put(Recomputing, "work_of", work_of)


@pytest.mark.parametrize(
    ("members", "liars"), [("abcd", "d"), pytest.param("abcdefgh", "gh", marks=pytest.mark.nightly)]
)
def test_who_says_that_it_lacks_what_it_never_asks_for_costs_one_its_place_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: str, liars: str
) -> None:
    monkeypatch.setitem(INSTALLED, "opening", _lack_a_part_of_others)
    run = with_audits(of_single_sequences(make_run(tmp_path, STEPS)), 1.0, 5)
    schedule = lying_to_the_end("opening", members, liars, 1.0)

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, schedule)
        assert one.lying.count
        honest = {peer.peer_id for peer in one.honest()}
        told = (event for peer in one.honest() for event in peer.events())
        seen = [set(event["members"]) for event in told if event["event"] == "view"]
        out = {peer_id for view in seen for peer_id in honest - view}
        assert len(out) <= len(liars), "one for each liar"
        assert all(any(liar not in view for view in seen) for liar in one.lying.names), "out"

    play(LIES, tmp_path / "world", scene)
