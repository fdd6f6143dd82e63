"""How much strangers draw from a member's uplink when they ask what it knows of the directory."""

import secrets
from typing import Any

import pytest

from p2p_dtfm.core.gate.gate_table import MIB
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.directory.node import KEYS_LIMIT
from p2p_dtfm.net.hivemind_parts import DHTID, dht_pb2
from p2p_dtfm.ports import now
from p2p_dtfm.ports.now import MachineClock
from tests.net.test_directory_doorway import served_node
from tests.net.test_node_table import new_peer


class _Clock(MachineClock):
    at_ns = 0

    def monotonic_ns(self) -> int:
        return self.at_ns


async def _asked(served: Any, peer: Any, count: int) -> Any:
    keys = [secrets.token_bytes(20) for _ in range(count)]
    call = dht_pb2.FindRequest(keys=keys, peer=dht_pb2.NodeInfo()).SerializeToString()
    return dht_pb2.FindResponse.FromString(await served["rpc_find"](bytes(call), peer))


async def _full_node(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A node that knows a hundred others."""
    node, served = await served_node(monkeypatch, GateKeeper())
    for _ in range(100):
        node.routing_table.add_or_update_node(DHTID.generate(), new_peer())
    return served


def test_one_stranger_draws_a_bounded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger drew 32 MB in ten seconds, 57 times what it sent."""

    async def scenario() -> None:
        clock, answered = _Clock(), 0
        now.live_by(clock)
        served, stranger = await _full_node(monkeypatch), new_peer()
        for _ in range(200):
            answered += (await _asked(served, stranger, KEYS_LIMIT)).ByteSize()
            clock.at_ns += 50_000_000
        assert MIB < answered < 2 * MIB
        assert (await _asked(served, new_peer(), 8)).results[0].nearest_node_ids, "another one"

    event_loop.run(scenario())


def test_who_reads_the_members_of_a_large_run_reads_them_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        clock = _Clock()
        now.live_by(clock)
        served, seeker = await _full_node(monkeypatch), new_peer()
        for _ in range(60):  # ours ask for eight keys in a call, or fewer
            found = await _asked(served, seeker, 8)
            assert all(len(it.nearest_node_ids) == 20 for it in found.results)

    event_loop.run(scenario())


def test_whoever_asks_too_much_may_bring_its_presence() -> None:
    """A debt for answers keeps nobody from publishing its presence."""
    keeper, nobody = GateKeeper(), "nobody"
    keeper.spend(nobody, "directory answer", 1 << 20)
    assert isinstance(keeper.enter(nobody, "directory answer", 0), str)
    assert not isinstance(keeper.enter(nobody, "directory", 100), str)
