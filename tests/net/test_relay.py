"""Our relay in p2pd's place, and calls back. Circuits need routers: tests/nat has those."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import peer_id_of
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
from p2p_dtfm.net.nat.relay import (
    CIRCUITS_LIMIT,
    CIRCUITS_LIMIT_PER_PEER,
    RESERVATIONS_LIMIT,
    Relay,
    reserve,
)
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
    """Writing an id of 4 KiB as text takes a tenth of a second. Twenty strangers each asked once a
    second for a circuit to such an id, and a daemon did nothing else."""
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


class Line:
    """Both ends of a stream to which nobody listens for long."""

    def __init__(self) -> None:
        self.sent = b""

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None:
        return

    async def read(self, count: int) -> bytes:
        return b""


def test_members_have_room_at_a_relay_that_strangers_have_filled() -> None:
    strangers = [f"stranger {n}" for n in range(RESERVATIONS_LIMIT + 1)]

    async def connected() -> tuple[str, ...]:
        return (*strangers, *(f"member {number}" for number in range(RESERVATIONS_LIMIT)))

    door = SimpleNamespace(is_near=lambda peer_id: peer_id.startswith("member"))
    host: Any = SimpleNamespace(peer_id="me", door=door, connected_peers=connected)
    relay = Relay(host)

    async def asks(peer_id: str) -> RelayStatus:
        line: Any = Line()
        await relay._reserve(peer_id, line, line)
        reader = asyncio.StreamReader()
        reader.feed_data(line.sent)
        return (await read_hop(reader)).status

    async def scenario() -> None:
        for stranger in strangers[:-1]:
            assert await asks(stranger) is RelayStatus.OK
        assert await asks(strangers[-1]) is RelayStatus.RESERVATION_REFUSED
        for number in range(RESERVATIONS_LIMIT):
            assert await asks(f"member {number}") is RelayStatus.OK
        assert len(relay._reserved_until_s) == RESERVATIONS_LIMIT
        assert await asks(f"member {RESERVATIONS_LIMIT}") is RelayStatus.RESERVATION_REFUSED

    run(scenario())


def test_strangers_leave_members_half_of_the_circuits() -> None:
    one, other = (peer_id_of(bytes([n]) * 32) for n in (1, 2))
    door = SimpleNamespace(is_near=lambda peer_id: peer_id == one)
    host: Any = SimpleNamespace(peer_id="me", door=door)
    relay = Relay(host)
    for number in range(CIRCUITS_LIMIT // 2):
        relay._circuits.update((f"stranger {number}", f"another {number}"))
    relay._reserved_until_s |= {one: 1e18, other: 1e18}
    assert relay._refusal(one, other) is RelayStatus.OK
    assert relay._refusal(other, one) is RelayStatus.OK, "whom a member waits for"
    third = peer_id_of(bytes([3]) * 32)
    assert relay._refusal(third, other) is RelayStatus.RESOURCE_LIMIT_EXCEEDED


def test_strangers_leave_room_for_those_who_call_a_member_as_members() -> None:
    """A stranger opened 32 circuits to a member behind a router. All others could not reach it for
    as long as the stranger liked. Eight such strangers had a whole relay."""
    member, fellow, stranger = (peer_id_of(bytes([n]) * 32) for n in (1, 2, 3))
    door = SimpleNamespace(is_near=lambda peer_id: peer_id in (member, fellow))
    host: Any = SimpleNamespace(peer_id="me", door=door)
    relay = Relay(host)
    relay._reserved_until_s[member] = 1e18
    opened = 0
    while relay._refusal(stranger, member) is RelayStatus.OK:
        relay._circuits.update((stranger, member))
        opened += 1
    assert opened == CIRCUITS_LIMIT_PER_PEER // 2
    assert relay._refusal(fellow, member) is RelayStatus.OK
    others = [(f"stranger {n}", f"member {n}") for n in range(CIRCUITS_LIMIT * 3 // 4 - opened)]
    for pair in others:
        relay._circuits.update(pair)
    relay._reserved_until_s[fellow] = 1e18
    assert relay._refusal(stranger, fellow) is RelayStatus.RESOURCE_LIMIT_EXCEEDED
    assert relay._refusal(member, fellow) is RelayStatus.OK


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
