"""A seeker finds members among thousands of inventions, and knocks at few doors for it."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.daemon.peers import discovery
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Unreachable

RUN = "ab" * 32


def _present(name: str) -> Presence:
    return Presence(name, 1, (f"/ip4/127.0.0.1/tcp/9/p2p/{name}",), RUN)


class _Directory:
    """Thousands of inventions, among whom are three members; one node knows these alone."""

    members = ("real-1", "real-2", "real-3")

    async def present_at(self, peer_ids: list[str], run_digest: str) -> list[Presence]:
        assert peer_ids == ["node"] and run_digest == RUN
        return [_present(name) for name in self.members]

    async def present_peers(self, run_digest: str) -> list[Presence]:
        return [_present(f"false-{n}") for n in range(4000)] + await self.present_at(["node"], RUN)


class _NodeKnowsNobody(_Directory):
    async def present_at(self, peer_ids: list[str], run_digest: str) -> list[Presence]:
        return []


class _Messenger:
    me = "me"

    def __init__(self) -> None:
        self.looked_up: list[str] = []

    async def look_up(self, peer_id: str, addresses: tuple[str, ...], was_there: bool) -> None:
        self.looked_up.append(peer_id)
        assert was_there == peer_id.startswith(("real", "new"))
        await asyncio.sleep(0.02)
        if peer_id.startswith("false"):
            raise Unreachable(peer_id, "nobody is there")


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def answer(messenger: Any, peer_id: str, *rest: Any) -> Any:
        return (peer_id, SimpleNamespace(lets_in=not peer_id.startswith("new")))

    monkeypatch.setattr(discovery, "ask_welcome_shortly", answer)


def _ask(messenger: Any, directory: Any) -> Any:
    return asyncio.run(discovery.ask_present(messenger, directory, ["node"], (), RUN))


def test_members_are_found_amid_four_thousand_inventions() -> None:
    messenger, began_s = _Messenger(), time.monotonic()
    found = _ask(messenger, _Directory())
    assert found is not None and found[0] in _Directory.members
    assert len(messenger.looked_up) <= 3 and time.monotonic() - began_s < 5


def test_a_seeker_knocks_at_a_bounded_number_of_doors() -> None:
    messenger = _Messenger()
    assert _ask(messenger, type("_", (_NodeKnowsNobody,), {"members": ()})()) is None
    assert len(messenger.looked_up) == discovery.ASKED_LIMIT


def test_newcomers_that_wait_themselves_are_passed_over() -> None:
    """Each would wait for the other to let it in."""
    members = ("new-1", "new-2", "real-1")
    for _ in range(10):  # whichever answers first
        found = _ask(_Messenger(), type("_", (_Directory,), {"members": members})())
        assert found is not None and found[0] == "real-1"
    only_new = type("_", (_Directory,), {"members": members[:2]})()
    assert _ask(_Messenger(), only_new) is None
