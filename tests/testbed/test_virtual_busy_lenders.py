"""Real daemons in virtual time, in one pipeline. A liar alone has the layers of its stage, and is
always too busy to lend the parameters to those that are to audit it."""

import math
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.step.lent_parameters import BegunWith
from p2p_dtfm.net.door import BUSY
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from tests.testbed.pairs import planned_in_rows

KIND = "busy lender"
STEPS = 8


def flip_and_lend_nothing(lie: Lie) -> None:
    INSTALLED["flip"](lie)

    def find(self: Any, digest: str) -> Any:
        raise PeerFault(BUSY)

    in_words.put(BegunWith, "find", find)


def test_who_is_always_too_busy_to_be_audited_does_not_keep_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever was drawn could not judge the work, nobody else could either, and each false step
    was committed, at any rate of audits."""
    monkeypatch.setitem(INSTALLED, KIND, flip_and_lend_nothing)
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    planned_in_rows(monkeypatch, LIES, ("abc",), (0, 2, 4))
    fault = Fault(1.0, math.inf, "lie", ("b",), 0.0, KIND)
    schedule = Schedule(tuple("abc"), (), (fault,), is_audited=True, liars=("b",), audit_rate=1.0)
    found = Player(tmp_path, STEPS).play(LIES, schedule)
    assert found.problem == "" and found.lies and not found.stayed
