"""A peer that has met members asks these first. It asks the directory a second later, or when none
answers."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.peers import member_search
from p2p_dtfm.daemon.peers.member_search import HEAD_START_S, Found, MemberSearch, Sought

MET = (("met", ("/ip4/192.0.2.7/tcp/1",)),)
FOUND: Any = SimpleNamespace()
"""A welcome that nobody reads."""


class Searched(MemberSearch):
    """Members that were met answer after `met_s`, or fail to. The directory knows a member at
    once."""

    def __init__(self, met_s: float, met_answers: bool) -> None:
        async def own() -> tuple[str, ...]:
            return ()

        nowhere: Any = SimpleNamespace()
        super().__init__(nowhere, nowhere, None, own)
        self._met_s, self._met_answers = met_s, met_answers
        self.directory_asked_s: float | None = None
        self._began_s = time.monotonic()

    async def _ask_met(self, sought: Sought, own: tuple[str, ...]) -> Found | None:
        await asyncio.sleep(self._met_s if sought.met else 0)
        return Found("met", FOUND, "met before") if self._met_answers else None

    async def _ask_directory(self, sought: Sought, own: tuple[str, ...]) -> Found | None:
        self.directory_asked_s = time.monotonic() - self._began_s
        return Found("other", FOUND, "in the directory")


def looked(search: Searched, met: tuple[tuple[str, tuple[str, ...]], ...]) -> str:
    found = asyncio.run(search.look(Sought("run", met)))
    assert found is not None
    return found.peer_id


def test_members_that_were_met_answer_and_nobody_looks_in_the_directory() -> None:
    search = Searched(met_s=0.05, met_answers=True)
    assert looked(search, MET) == "met"
    assert search.directory_asked_s is None


def test_where_they_say_nothing_the_directory_is_asked_after_the_head_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(member_search, "MET_FIRST_S", 0.1)
    search = Searched(met_s=60, met_answers=False)
    assert looked(search, MET) == "other"
    assert search.directory_asked_s is not None
    assert search.directory_asked_s >= 0.99 * HEAD_START_S


@pytest.mark.parametrize("met", [(), MET], ids=["nobody was met", "all have failed to answer"])
def test_where_there_is_nobody_to_wait_for_it_is_asked_at_once(
    met: tuple[tuple[str, tuple[str, ...]], ...],
) -> None:
    search = Searched(met_s=0, met_answers=False)
    assert looked(search, met) == "other"
    assert search.directory_asked_s is not None
    assert search.directory_asked_s < HEAD_START_S / 2
