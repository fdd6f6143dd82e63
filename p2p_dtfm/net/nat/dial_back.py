"""Whether others can call this peer: a peer that it called itself tries to call back.

The connection that asked is no proof: a router lets answers in, and nothing else. So the asked peer
opens a new connection, from another port. It calls only the host where the question came from, so
nobody can make it knock at a stranger's door.
"""

import asyncio
import contextlib
import logging

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.addresses import far_end, is_loopback, is_number
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now

PORTS_LIMIT = 4
DIAL_DEADLINE_S = 3.0
ASK_DEADLINE_S = 10.0
DIALS_LIMIT = 16
_REQUEST_LIMIT_BYTES = 256
_GREETING = b"\x13/multistream/1.0.0\n"
"""What every libp2p listener says first."""

log = logging.getLogger(__name__)


class CallBack(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The ports at which the asking peer believes it can be reached."""

    ports: tuple[int, ...]


class SeenAddress(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a question came from, and which ports answered there."""

    host: str
    port: int
    open_ports: tuple[int, ...]


class CallBacks:
    """Calls back each peer that asks. `await ready()` before others may ask."""

    def __init__(self, host: HostPort) -> None:
        self._host = host
        self._control = ControlPlane(host, self._answer, name="reachability")
        self._dialling: set[str] = set()

    async def ready(self) -> "CallBacks":
        """Start to answer."""
        await self._control.ready()
        return self

    async def ask(self, peer_id: str, ports: tuple[int, ...]) -> SeenAddress:
        """How a connected peer sees this one. Raises `Unreachable`, `Refused` or `PeerFault`."""
        request = encode(CallBack(ports[:PORTS_LIMIT]))
        reply = await self._control.call(peer_id, request, ASK_DEADLINE_S)
        seen = decode(reply, SeenAddress, _REQUEST_LIMIT_BYTES)
        is_somewhere = is_number(seen.host) and 0 < seen.port < 1 << 16
        if not is_somewhere or not set(seen.open_ports) <= set(ports):
            raise PeerFault("sees this peer where nobody can be", peer_id)
        return seen

    async def _answer(self, sender: str, body: bytes) -> bytes:
        request = decode(body, CallBack, _REQUEST_LIMIT_BYTES)
        ports = request.ports
        if len(ports) > PORTS_LIMIT or any(not 0 < port < 1 << 16 for port in ports):
            raise PeerFault("asks for calls to ports that there are not", sender)
        address = await self._host.direct_address(sender)
        if address is None:
            raise PeerFault("asks over a relay, so nobody sees where it is", sender)
        if is_loopback(address) and not self._host.is_only_local:
            raise PeerFault("asks over a connection that was joined to ours here", sender)
        if (end := far_end(address)) is None:
            raise PeerFault("asks from a host that has no plain number", sender)
        if sender in self._dialling or len(self._dialling) >= DIALS_LIMIT:
            raise PeerFault("busy", sender)
        name, port = end
        called = self._doors(name, ports)
        self._dialling.add(sender)
        try:
            answers = await asyncio.gather(*(_is_libp2p(name, port) for port in called))
        finally:
            self._dialling.discard(sender)
        answering = tuple(port for port, answered in zip(called, answers, strict=True) if answered)
        for port in answering:
            self._host.calling.dialling.answered((name, port))
        return encode(SeenAddress(name, port, answering))

    def _doors(self, name: str, ports: tuple[int, ...]) -> list[int]:
        """The ports that were not called in vain lately. Raises `PeerFault` where none is left."""
        doors = [(name, port) for port in dict.fromkeys(ports)]
        chosen = self._host.calling.dialling.call_back(doors, now.monotonic_ns())
        if ports and not chosen:
            raise PeerFault("was called there already, and in vain")
        return [port for _, port in chosen]

    async def close(self) -> None:
        """Stop the calls that are under way."""
        await self._control.close()


async def _is_libp2p(host: str, port: int) -> bool:
    """Whether a libp2p peer answers there, and not a router's own page."""
    with contextlib.suppress(OSError, EOFError, TimeoutError):
        async with asyncio.timeout(DIAL_DEADLINE_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                return await reader.readexactly(len(_GREETING)) == _GREETING
            finally:
                writer.close()
    return False
