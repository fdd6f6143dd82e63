"""Audits of a step that was stopped, and what others are told of them meanwhile."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.audit.accounts import GONE_LIMIT
from p2p_dtfm.core.audit.work import GONE_WORK
from p2p_dtfm.core.messages.work import Kind, Lack
from p2p_dtfm.daemon.step.asked_parts import AskedParts
from p2p_dtfm.daemon.trainer import audits as rooms
from p2p_dtfm.daemon.trainer.audits import Audits
from p2p_dtfm.daemon.trainer.stopped_steps import DENIED
from p2p_dtfm.daemon.trainer.trainer_state import TrainerState
from tests.core.audit.parts import NAMES, PLAN
from tests.core.audit.test_earlier_claims import claim, share_of
from tests.daemon.trainer_parts import QuietOutlet, trainer_tools

NOTHING: Any = None


def audits_in(directory: Path) -> Any:
    tools = trainer_tools(directory, "a", NOTHING, NOTHING)
    return Audits(tools, QuietOutlet(), TrainerState("a"))


def test_who_fetches_what_a_lost_work_has_read_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for its Prepared, and would take it for who stands still."""
    audits, said = audits_in(tmp_path), []

    async def fetched(*what: Any) -> bool:
        said.append(audits.fetches)
        return False

    monkeypatch.setattr(rooms, "could_have_shards", fetched)
    audits._stopped = SimpleNamespace(shards_of=lambda it: None)
    late = SimpleNamespace(stopped=SimpleNamespace(plan=PLAN))
    asyncio.run(audits._judged_late(NOTHING, late))
    assert said == [True] and not audits.fetches


def test_of_very_many_that_are_gone_some_are_told_of_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More make an account false, and with it everybody's Prepared."""
    audits = audits_in(tmp_path)
    gone = [SimpleNamespace(peer_id=f"gone-{n:02}") for n in range(GONE_LIMIT + 3)]

    async def denied(*what: Any) -> bytes:
        return DENIED

    audits._stopped = SimpleNamespace(changed=lambda *_: [], unjudged=lambda *_: gone)
    monkeypatch.setattr(audits, "_unless_over", lambda view, judged: judged)
    monkeypatch.setattr(audits, "_judged_late", denied)
    snapshot = SimpleNamespace(bars=())
    here = SimpleNamespace(
        book=SimpleNamespace(claims={}),
        plan=PLAN,
        view=SimpleNamespace(snapshot=snapshot),
        step=1,
        engine=SimpleNamespace(states={}),
    )
    found = asyncio.run(audits._otherwise_before(here))
    assert found == {f"gone-{n:02}": GONE_WORK for n in range(GONE_LIMIT)}


def test_a_chunk_whose_bytes_another_has_too_is_not_named() -> None:
    """As of the rows of tokens that do not come up: it would be named as one that was given."""
    asked, share = AskedParts(), share_of("d")
    parts = share.parts[0]
    layer = PLAN.segments()[0].first_layer
    with asked.waiting(PLAN, "d", claim("d", share), parts[1].hex()):
        assert asked.lacks == (Lack("d", Kind.PART, layer, 1),)
    share.parts[0] = (parts[1],) * len(NAMES)
    with asked.waiting(PLAN, "d", claim("d", share), parts[1].hex()):
        assert asked.lacks == ()
