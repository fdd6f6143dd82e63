"""A relay for peers behind routers: libp2p's circuit relay v2, its public side.

p2pd has a relay of its own, whose limits cannot be set: it cuts a circuit after 128 KiB or two
minutes (decision 14). This one takes its place in p2pd. What it carries is encrypted between the
two ends, by their own keys. The relay sees bytes, and who speaks with whom.
"""

import asyncio
import collections
import contextlib
import logging
from collections.abc import Callable

import base58

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import is_peer_id
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.libp2p.port import HostPort, Writer
from p2p_dtfm.net.nat.circuit_messages import (
    HOP_PROTOCOL,
    STOP_PROTOCOL,
    HopKind,
    RelayMessage,
    RelayStatus,
    StopKind,
    encode_hop,
    encode_stop,
    read_hop,
    read_stop,
)
from p2p_dtfm.net.nat.until_one_ends import until_one_ends
from p2p_dtfm.ports import now

RESERVATION_S = 3600.0
RESERVATIONS_LIMIT = 128
CIRCUITS_LIMIT = 256
CIRCUITS_LIMIT_PER_PEER = 32
IDLE_S = 300.0
"""libp2p's connections say something each 30 s, or they are dead."""
DEADLINE_S = 10.0
PEER_ID_LIMIT_BYTES = 64
"""To write a peer id of 4 KiB as text takes a tenth of a second."""
_READ_BYTES = 1 << 16

log = logging.getLogger(__name__)


class Relay:
    """Serves reservations and circuits while `is_open()`. `await ready()` before others may ask."""

    def __init__(self, host: HostPort, is_open: Callable[[], bool] = lambda: True) -> None:
        self._host = host
        self._is_open = is_open
        self._reserved_until_s: dict[str, float] = {}
        self._circuits: collections.Counter[str] = collections.Counter()
        """Both ends of all circuits that go through this relay."""

    async def ready(self) -> "Relay":
        """Take the place of p2pd's own relay."""
        await self._host.serve_streams(HOP_PROTOCOL, self._serve, "relay")
        return self

    @property
    def circuits(self) -> int:
        """Circuits that are open now."""
        return self._circuits.total() // 2

    async def _serve(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        with contextlib.suppress(TimeoutError, Unreachable, *CONNECTION_ERRORS):
            try:
                async with asyncio.timeout(DEADLINE_S):
                    message = await read_hop(reader)
            except PeerFault:
                await _answer(reader, writer, RelayStatus.MALFORMED_MESSAGE)
                return
            if message.kind == HopKind.RESERVE:
                await self._reserve(sender, reader, writer)
            elif message.kind == HopKind.CONNECT:
                await self._connect(sender, message.peer, reader, writer)
            else:
                await _answer(reader, writer, RelayStatus.UNEXPECTED_MESSAGE)

    async def _reserve(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        if not self._is_open():
            await _answer(reader, writer, RelayStatus.PERMISSION_DENIED)
            return
        now_s = now.monotonic_s()
        held = self._reserved_until_s
        if sender not in held and len(held) >= RESERVATIONS_LIMIT:
            self._forget_absent(await self._host.connected_peers())
        if sender not in held and len(held) >= RESERVATIONS_LIMIT:
            self._forget_a_stranger_for(sender)
        if sender not in held and len(held) >= RESERVATIONS_LIMIT:
            await _answer(reader, writer, RelayStatus.RESERVATION_REFUSED)
            return
        if sender not in held:
            log.info("relays for %s", sender)
        held[sender] = now_s + RESERVATION_S
        await _answer(reader, writer, RelayStatus.OK, int(now.wall_s() + RESERVATION_S))

    def _forget_absent(self, connected: tuple[str, ...]) -> None:
        held, now_s = self._reserved_until_s, now.monotonic_s()
        for peer_id in [p for p, until_s in held.items() if p not in connected or until_s < now_s]:
            del held[peer_id]

    def _forget_a_stranger_for(self, sender: str) -> None:
        """Drop a stranger's reservation for a member: new keys cost strangers nothing."""
        is_near = self._host.door.is_near
        stranger = next((it for it in self._reserved_until_s if not is_near(it)), None)
        if stranger is not None and is_near(sender):
            del self._reserved_until_s[stranger]

    async def _connect(
        self, caller: str, raw: bytes, reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        called = base58.b58encode(raw[:PEER_ID_LIMIT_BYTES]).decode()
        status = self._refusal(caller, called)
        if status is not RelayStatus.OK:
            await _answer(reader, writer, status)
            return
        pair = (caller, called)
        self._circuits.update(pair)
        try:
            try:
                far_reader, far_writer = await self._call(caller, called)
            except (Unreachable, Refused, PeerFault) as error:
                log.debug("no circuit from %s to %s: %s", caller, called, error)
                await _answer(reader, writer, RelayStatus.CONNECTION_FAILED)
                return
            try:
                writer.write(encode_hop(RelayMessage(HopKind.STATUS, status=RelayStatus.OK)))
                await until_one_ends(_carry(reader, far_writer), _carry(far_reader, writer))
            finally:
                far_writer.close()
        finally:
            self._circuits.subtract(pair)
            self._circuits += collections.Counter()  # forgets those at zero

    def _refusal(self, caller: str, called: str) -> RelayStatus:
        if not is_peer_id(called) or called in (caller, self._host.peer_id):
            return RelayStatus.MALFORMED_MESSAGE
        if self._reserved_until_s.get(called, 0.0) < now.monotonic_s():
            return RelayStatus.NO_RESERVATION
        is_near, limit = self._host.door.is_near, CIRCUITS_LIMIT
        per_peer = CIRCUITS_LIMIT_PER_PEER
        if not is_near(caller):  # new keys cost nothing: keep room for members
            limit = CIRCUITS_LIMIT * 3 // 4 if is_near(called) else CIRCUITS_LIMIT // 2
            per_peer = CIRCUITS_LIMIT_PER_PEER // 2
        if self.circuits >= limit or self._circuits[called] >= per_peer:
            return RelayStatus.RESOURCE_LIMIT_EXCEEDED
        if self._circuits[caller] >= CIRCUITS_LIMIT_PER_PEER:
            return RelayStatus.RESOURCE_LIMIT_EXCEEDED
        return RelayStatus.OK

    async def _call(self, caller: str, called: str) -> tuple[asyncio.StreamReader, Writer]:
        """Open a circuit's stream to a connected peer. One that is not connected is not looked for.
        Otherwise two relays could look for it through each other, and the caller would wait and
        hear nothing."""
        if await self._host.direct_address(called) is None:
            raise Unreachable(called, "its connection is gone")
        reader, writer = await self._host.open_stream(called, STOP_PROTOCOL, DEADLINE_S)
        try:
            raw = base58.b58decode(caller)
            writer.write(encode_stop(RelayMessage(StopKind.CONNECT, peer=raw)))
            async with asyncio.timeout(DEADLINE_S):
                reply = await read_stop(reader)
            if reply.status is not RelayStatus.OK:
                raise Refused(f"it takes no circuit: {reply.status.name}", called)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            writer.close()
            raise Unreachable(called, "no answer to a circuit") from error
        except BaseException:
            writer.close()
            raise
        return reader, writer


async def _carry(reader: asyncio.StreamReader, writer: Writer) -> None:
    with contextlib.suppress(TimeoutError, *CONNECTION_ERRORS):
        while True:
            async with asyncio.timeout(IDLE_S):
                data = await reader.read(_READ_BYTES)
            if not data:
                return
            writer.write(data)
            await writer.drain()


async def reserve(host: HostPort, relay: str) -> float:
    """Ask a relay to let others reach this peer through it. Returns for how many seconds it will.

    Raises `Unreachable`, or `Refused` by a relay that is full, closed, or only for a few bytes.
    """
    reader, writer = await host.open_stream(relay, HOP_PROTOCOL, DEADLINE_S)
    try:
        writer.write(encode_hop(RelayMessage(HopKind.RESERVE)))
        async with asyncio.timeout(DEADLINE_S):
            reply = await read_hop(reader)
    except PeerFault as fault:
        raise Refused(fault.cause, relay) from fault
    except (TimeoutError, *CONNECTION_ERRORS) as error:
        raise Unreachable(relay, "it does not answer as a relay") from error
    finally:
        writer.close()
    if reply.status is not RelayStatus.OK:
        raise Refused(f"it does not relay: {reply.status.name.lower().replace('_', ' ')}", relay)
    if reply.limited:
        raise Refused("it relays a few bytes only", relay)
    return min(max(60.0, reply.expires_s - now.wall_s()), RESERVATION_S)


def relayed_address(relay_address: str, relay: str, peer_id: str) -> str:
    """Where `peer_id` is reached through a relay. `relay_address` comes without its /p2p/ part."""
    return f"{relay_address}/p2p/{relay}/p2p-circuit/p2p/{peer_id}"


async def _answer(
    reader: asyncio.StreamReader, writer: Writer, status: RelayStatus, expires_s: int = 0
) -> None:
    writer.write(encode_hop(RelayMessage(HopKind.STATUS, status=status, expires_s=expires_s)))
    await writer.drain()
    async with asyncio.timeout(DEADLINE_S):
        await reader.read(1)  # closing first would lose the answer
