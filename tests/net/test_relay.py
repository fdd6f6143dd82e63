"""Our relay in p2pd's place, and calls back; circuits need routers: tests/nat has those."""

import asyncio
from pathlib import Path

import base58
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.errors import Refused
from p2p_dtfm.net.nat.circuit_messages import (
    HOP_PROTOCOL,
    HopKind,
    RelayMessage,
    RelayStatus,
    encode_hop,
    read_hop,
)
from p2p_dtfm.net.nat.dial_back import CallBacks
from p2p_dtfm.net.nat.relay import Relay, reserve
from tests.net.net_support import hosts, run


def test_who_cannot_be_called_relays_for_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (middle, other):
            await Relay(middle, lambda: False).ready()
            with pytest.raises(Refused, match="permission denied"):
                await reserve(other, middle.peer_id)

    run(scenario())


def test_whom_nobody_can_be_is_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An id of 4 KiB takes a tenth of a second to be written as text: of twenty strangers that each
    asked once a second for a circuit to such a one, a daemon did nothing else."""
    written: list[int] = []
    encode = base58.b58encode

    def counted(raw: bytes) -> bytes:
        written.append(len(raw))
        return encode(raw)

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (middle, other):
            await Relay(middle).ready()
            monkeypatch.setattr(base58, "b58encode", counted)
            for raw in (b"", b"x" * 60, b"x" * 4000):
                reader, writer = await other.open_stream(middle.peer_id, HOP_PROTOCOL, 5.0)
                writer.write(encode_hop(RelayMessage(HopKind.CONNECT, peer=raw)))
                async with asyncio.timeout(5.0):
                    reply = await read_hop(reader)
                assert reply.status is RelayStatus.MALFORMED_MESSAGE
                writer.close()

    run(scenario())
    assert max(written, default=0) < 100


def test_a_peer_is_called_back_where_it_is_and_nowhere_else(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (asked, asking):
            port = int((await asking.addresses())[0].split("/")[4])
            server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1")
            other = server.sockets[0].getsockname()[1]
            await CallBacks(asked).ready()
            callbacks = CallBacks(asking)
            seen = await callbacks.ask(asked.peer_id, (other, port))
            assert seen.open_ports == (port,), "only a libp2p peer counts"
            assert seen.host == "127.0.0.1"
            with pytest.raises((Refused, PeerFault)):
                await callbacks.ask(asked.peer_id, (0,))
            server.close()

    run(scenario())
