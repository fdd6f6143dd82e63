"""Real daemons in virtual time: a liar opens one thing to half of the others and another to the
rest, in the first step of a view, where nobody has committed itself. Each half drew others, waited
for them, and had honest members out. Later in a view an opening can be false. A member that alone
was told a false one was the only one to accuse its maker, and of the two the honest one went."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.audit.work import OPENING_BYTES, signed_claim
from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import (
    lying_to_the_end,
    of_single_sequences,
    views_with_all_honest,
    with_lies,
)

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


def _open_falsely_to_one(lie: Lie) -> None:
    """To one honest member the liar opens something that it was not committed to, and to the others
    the right value."""
    honest = Audits._say

    def say(self: Any, here: Any, said: Any) -> None:
        me = self._tools.me
        is_claim = isinstance(said, Claimed) and here.book.has_committed(me)
        if not is_claim or not lie.is_told(here.step):
            honest(self, here, said)
            return
        here.book.record(me, said)
        other = msgspec.structs.replace(said, opening=bytes(OPENING_BYTES))
        other = signed_claim(other, me, self._tools.net.sign)
        others = [it for it in sorted(here.plan.stage_holders()) if it not in (me, *lie.colluders)]
        for peer_id in here.plan.stage_holders():
            is_it = peer_id == others[here.step % len(others)]
            self._tools.net.messenger.tell(peer_id, other if is_it else said)

    in_words.put(Audits, "_say", say)


@pytest.mark.parametrize(
    ("members", "liars"), [("abcd", "a"), pytest.param("abcdefgh", "gh", marks=pytest.mark.nightly)]
)
def test_who_alone_is_told_a_false_opening_shows_it_to_the_others_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: str, liars: str
) -> None:
    monkeypatch.setitem(INSTALLED, "opening", _open_falsely_to_one)
    run = with_audits(of_single_sequences(make_run(tmp_path, STEPS)), 0.5, 5)
    schedule = lying_to_the_end("opening", members, liars, 0.5)

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, schedule)
        assert one.lying.count == len(liars), "barred for the first time that they do it"
        seen = views_with_all_honest(one)
        assert all(any(liar not in view for view in seen) for liar in one.lying.names), "out"
        assert "has claimed one thing to some" in "\n".join(one.lying.reports)

    play(LIES, tmp_path / "world", scene)
