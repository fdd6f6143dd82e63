"""Real daemons in virtual time, in one pipeline. A liar alone has the layers of its stage, and is
always too busy to lend the parameters to those that are to audit it, or lends them slowly."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.daemon.node.effects import Effects
from p2p_dtfm.daemon.step.lent_parameters import BegunWith
from p2p_dtfm.net.door import BUSY
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from tests.testbed.pairs import peer_id_of, planned_in_rows

KIND = "busy lender"
STEPS = 8
LENDS_AFTER_S = 25.0
"""A chunk may take thirty seconds where no other donor is there."""


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


def test_who_lends_slowly_has_no_judge_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A judge asked for as long as anything came. All others took it for the one that holds them
    up, and it was out in place of the liar."""
    names = "abcde"
    planned_in_rows(monkeypatch, LIES, (names,), (0, 1, 2, 3, 4))
    ids = {peer_id_of(LIES, name): name for name in names}
    read, take_over = BlobExchange._read, Effects._take_over
    members = list[set[str]]()

    async def slowly(self: Any, found: Any, request: Any) -> Any:
        if isinstance(found, memoryview) and ids.get(self._plane._host.peer_id) == "b":
            await asyncio.sleep(LENDS_AFTER_S)
        return await read(self, found, request)

    def noted(self: Any, action: Any) -> None:
        members.append({ids[it] for it in action.view.member_ids if it in ids})
        take_over(self, action)

    monkeypatch.setattr(BlobExchange, "_read", slowly)
    monkeypatch.setattr(Effects, "_take_over", noted)
    fault = Fault(1.0, math.inf, "lie", ("b",), 0.0, "flip")
    schedule = Schedule(tuple(names), (), (fault,), is_audited=True, liars=("b",), audit_rate=1.0)
    found = Player(tmp_path, STEPS).play(LIES, schedule)
    assert found.problem == "" and found.lies and not found.stayed
    honest, all_in = {*names} - {"b"}, members.index({*names})
    assert all(here >= honest for here in members[all_in:]), members
