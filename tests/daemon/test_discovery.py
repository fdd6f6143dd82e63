"""A seeker finds members among thousands of inventions, and asks few peers for that."""

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
    """Thousands of inventions and three members among them. One node knows these three alone."""

    members = ("real-1", "real-2", "real-3")

    nodes: tuple[str, ...] = ()

    async def present_by_node(self, peer_ids: list[str], run_digest: str) -> list[list[Presence]]:
        assert run_digest == RUN
        return [self._held(peer_id) for peer_id in peer_ids]

    def _held(self, node: str) -> list[Presence]:
        return [_present(name) for name in self.members]

    async def present_peers(self, run_digest: str) -> list[Presence]:
        return [_present(f"false-{n}") for n in range(4000)] + self._held("node")


class _NodeKnowsNobody(_Directory):
    def _held(self, node: str) -> list[Presence]:
        return []


class _NodeInvents(_Directory):
    """The node through which the seeker came has thousands of inventions. Another node has the
    members."""

    nodes = ("node", "other")

    def _held(self, node: str) -> list[Presence]:
        invented = [_present(f"false-{n}") for n in range(4000)]
        return invented if node == "node" else super()._held(node)


class _Messenger:
    me = "me"

    def __init__(self) -> None:
        self.looked_up: list[str] = []

    async def look_up(self, peer_id: str, addresses: tuple[str, ...], was_there: bool) -> None:
        self.looked_up.append(peer_id)
        assert was_there or not peer_id.startswith("new")
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


def test_what_one_node_invents_does_not_hide_what_another_holds() -> None:
    messenger, began_s = _Messenger(), time.monotonic()
    found = _ask(messenger, _NodeInvents())
    assert found is not None and found[0] in _Directory.members
    assert time.monotonic() - began_s < 3


def test_who_says_nothing_does_not_keep_a_seeker_from_looking_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def silence(*rest: Any) -> Any:
        await asyncio.sleep(15)

    monkeypatch.setattr(discovery, "ask_welcome", silence)
    monkeypatch.setattr(discovery, "WELCOME_ALONE_S", 0.1)
    said: list[str] = []
    finding = discovery.find_run(
        _Messenger(),  # type: ignore[arg-type]
        _Directory(),  # type: ignore[arg-type]
        ["node"],
        (),
        RUN,
        said.append,
        lambda peer_id: False,
    )
    found = asyncio.run(asyncio.wait_for(finding, 5))
    assert found[0] in _Directory.members and "looks in the directory" in said[0]


def test_a_seeker_knocks_at_a_bounded_number_of_doors() -> None:
    messenger = _Messenger()
    assert _ask(messenger, type("_", (_NodeKnowsNobody,), {"members": ()})()) is None
    assert len(messenger.looked_up) == discovery.ASKED_LIMIT


def test_newcomers_that_wait_themselves_are_passed_over() -> None:
    """Each newcomer would wait for the other to let it in."""
    members = ("new-1", "new-2", "real-1")
    for _ in range(10):  # whichever answers first
        found = _ask(_Messenger(), type("_", (_Directory,), {"members": members})())
        assert found is not None and found[0] == "real-1"
    only_new = type("_", (_Directory,), {"members": members[:2]})()
    assert _ask(_Messenger(), only_new) is None
