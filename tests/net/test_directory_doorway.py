"""A node of the directory asks its door before it reads what comes."""

import time
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.directory.node import KEYS_LIMIT
from p2p_dtfm.net.door import OpenDoor
from p2p_dtfm.net.hivemind_parts import DHTID, P2P, PeerID, dht_pb2
from tests.net.test_node_table import new_peer, node_on

Serve = Callable[[bytes, PeerID], Awaitable[bytes]]


class _Door(OpenDoor):
    def __init__(self, refusal: str = "") -> None:
        self.asked: list[int] = []
        self.blamed = 0
        self._refusal = refusal

    def enter(self, sender: str, kind: str, size_bytes: int) -> Any:
        self.asked.append(size_bytes)
        return self._refusal or super().enter(sender, kind, size_bytes)

    def blame(self, sender: str, kind: str) -> None:
        self.blamed += 1


class _P2P(P2P):  # type: ignore[misc]
    """hivemind's own class, without a p2pd that would have to be ended."""

    def __del__(self) -> None:
        pass


async def served_node(monkeypatch: pytest.MonkeyPatch, door: Any) -> tuple[Any, dict[str, Serve]]:
    """A node, and the handlers with which it answers calls, by name."""
    served: dict[str, Serve] = {}

    async def add_unary_handler(name: str, handler: Serve, balanced: bool = False) -> None:
        served[name.partition(".")[2]] = handler

    p2p = _P2P()
    p2p._client = SimpleNamespace(add_unary_handler=add_unary_handler)
    node = await node_on(p2p, client_mode=False)
    node.host = SimpleNamespace(door=door)

    async def nothing(*_: Any, **__: Any) -> None:
        return None

    monkeypatch.setattr(node, "call_ping", nothing)
    monkeypatch.setattr(node, "call_store", nothing)
    return node, served


def _find(count: int) -> bytes:
    keys = [DHTID.generate().to_bytes() for _ in range(count)]
    return bytes(dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo()).SerializeToString())


def test_the_door_is_asked_however_many_keys_a_call_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        door = _Door()
        _, served = await served_node(monkeypatch, door)
        for number, name in enumerate(("rpc_find", "rpc_store"), 1):
            call = _find(KEYS_LIMIT + 1)  # the keys of both have the same place
            with pytest.raises(PeerFault, match="257 keys"):
                await served[name](call, new_peer())
            assert door.asked.count(len(call)) == number and door.blamed == number

    event_loop.run(scenario())


@pytest.mark.parametrize("refusal", ["", "too large"])
def test_a_call_of_millions_of_keys_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch, refusal: str
) -> None:
    """Two million empty keys in 4 MB took 0.4 s, and the door was not asked."""

    async def scenario() -> None:
        door = _Door(refusal)
        _, served = await served_node(monkeypatch, door)
        empty_key = dht_pb2.FindRequest(keys=[b""]).SerializeToString()
        calls = 2_000_000 * bytes(empty_key)
        for name in ("rpc_find", "rpc_store"):
            began_s = time.thread_time()
            with pytest.raises(PeerFault):
                await served[name](calls, new_peer())
            assert time.thread_time() - began_s < 0.05
        assert door.asked.count(len(calls)) == 2

    event_loop.run(scenario())


def test_a_correct_node_that_is_turned_away_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the node were silent, the other one would take it for gone."""

    async def scenario() -> None:
        node, served = await served_node(monkeypatch, _Door("busy"))
        found = dht_pb2.FindResponse.FromString(await served["rpc_find"](_find(8), new_peer()))
        assert [it.type for it in found.results] == 8 * [dht_pb2.NOT_FOUND]
        ping = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=DHTID.generate().to_bytes()))
        answer = await served["rpc_ping"](ping.SerializeToString(), new_peer())
        assert dht_pb2.PingResponse.FromString(answer).peer == node.node_info
        assert not node.routing_table.uid_to_peer_id

    event_loop.run(scenario())
