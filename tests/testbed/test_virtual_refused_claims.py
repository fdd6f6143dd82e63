"""Real daemons in virtual time, of which one signs a claim that nobody can have made: one of no
gradients at all. All others refuse it, so it has claimed nothing, and has sent false gradients."""

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.audit.work import signed_claim
from p2p_dtfm.core.messages.audit_messages import Claimed
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.in_words import put
from p2p_dtfm.testbed.lies.in_work import change_gradients
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule

KIND, NAMES, LIAR, STEPS = "no parts", "abcd", "d", 16


def _claim_no_parts(lie: Lie) -> None:
    """Its own daemon takes the claim for the right one, and goes on."""
    honest = Audits._say

    def say(self: Any, here: Any, said: Any) -> None:
        if not isinstance(said, Claimed) or not lie.is_told(here.step):
            honest(self, here, said)
            return
        me, net = self._tools.me, self._tools.net
        here.book.record(me, said)
        share = msgspec.structs.replace(said.share, parts={}, got={})
        other = signed_claim(msgspec.structs.replace(said, share=share), me, net.sign)
        for peer_id in sorted(here.plan.stage_holders()):
            net.messenger.tell(peer_id, other)

    put(Audits, "_say", say)
    change_gradients(lie)


@pytest.mark.nightly
def test_who_claims_what_nobody_does_is_out_like_one_that_claims_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INSTALLED, KIND, _claim_no_parts)
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    fault = Fault(1.0, math.inf, "lie", (LIAR,), 0.0, KIND)
    schedule = Schedule(tuple(NAMES), (), (fault,), is_audited=True, liars=(LIAR,), audit_rate=1.0)
    found = Player(tmp_path, STEPS).play(LIES, schedule)
    assert found.problem == "" and found.lies and not found.stayed
    assert found.settled_s < 30, "the others wait for it as for one that is silent"
