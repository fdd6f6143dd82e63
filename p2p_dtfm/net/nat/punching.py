"""Direct connections between two peers behind routers, agreed on over a relay.

Both peers send their first packet at once, each to where the other one's router shows it to the
world. On the way out the packet makes its own router expect an answer. The other's packet looks
like one, and is let in: a TCP connection that both ends opened. libp2p wants one end to have called
and the other to have listened. So the called peer opens its end itself and joins it to its own
p2pd. p2pd's own way (DCUtR) begins only when four machines elsewhere have seen a peer (decision
14).
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.addresses import is_number, is_public, one_spelling, tcp_address
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.nat.until_one_ends import until_one_ends
from p2p_dtfm.ports import now

ASK_DEADLINE_S = 5.0
OPEN_DEADLINE_S = 6.0
"""p2pd gives up a call after five seconds."""
BRIDGES_LIMIT = 64
"""Half of the bridges are kept for members: each lasts as long as the peer that asked for it
likes."""
PEERS_REMEMBERED = 1024
_REQUEST_LIMIT_BYTES = 256
_READ_BYTES = 1 << 18

Endpoint = tuple[str, int]

log = logging.getLogger(__name__)


class CallMe(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the asking peer is seen, and whether anybody can call it there."""

    host: str
    port: int
    is_open: bool


class CalledAt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the asked peer is seen; empty where it calls by itself."""

    host: str
    port: int


class Punching:
    """Makes relayed links direct. `await ready()` before others may ask.

    `endpoint()` is where the world sees this peer, or None if that is not known. `is_open()` says
    whether anybody can call it there. `listen_port()` is the port at which its p2pd listens, or 0
    if not known.
    """

    def __init__(
        self,
        host: HostPort,
        endpoint: Callable[[], Endpoint | None],
        is_open: Callable[[], bool],
        listen_port: Callable[[], int],
    ) -> None:
        self._host = host
        self._endpoint = endpoint
        self._is_open = is_open
        self._listen_port = listen_port
        self._control = ControlPlane(host, self._answer, name="punching")
        self._under_way: set[str] = set()
        self.asked_s: dict[str, float] = {}
        """When each peer last asked for a direct connection: then it need not be asked."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        """The work under way for each peer that asked, one at a time."""

    async def ready(self) -> "Punching":
        """Start to answer."""
        await self._control.ready()
        return self

    async def punch(self, peer_id: str, relayed: tuple[str, ...]) -> bool:
        """Try for a direct connection to a relayed peer, and say whether it came about. Meanwhile
        the relayed connection is cut; `relayed` is where the peer is found again."""
        endpoint = self._endpoint()
        trusts = self._host.calling.trusts(peer_id)  # otherwise the peer may ask by itself
        if endpoint is None or peer_id in self._under_way or not trusts:
            return False
        self._under_way.add(peer_id)
        try:
            request = encode(CallMe(*endpoint, self._is_open()))
            reply = await self._control.call(peer_id, request, ASK_DEADLINE_S)
            called_at = decode(reply, CalledAt, _REQUEST_LIMIT_BYTES)
            if called_at.host:
                await self._host.disconnect(peer_id)
                where = tcp_address(called_at.host, called_at.port)
                await self._host.connect(peer_id, [where, *relayed], OPEN_DEADLINE_S)
            return await self._becomes_direct(peer_id)
        except (Unreachable, Refused, PeerFault) as error:
            log.debug("no direct connection: %s", error)
            return False
        finally:
            self._under_way.discard(peer_id)

    async def _becomes_direct(self, peer_id: str) -> bool:
        """Wait until the connection is direct: a peer that calls back by itself needs a moment."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(OPEN_DEADLINE_S if self._is_open() else 1.0):
                while await self._host.direct_address(peer_id) is None:
                    await asyncio.sleep(0.05)
                return True
        return False

    async def _answer(self, sender: str, body: bytes) -> bytes:
        request = decode(body, CallMe, _REQUEST_LIMIT_BYTES)
        is_somewhere = is_number(request.host) and is_public(request.host)
        if not is_somewhere or not 0 < request.port < 1 << 16:
            raise PeerFault("an address that nobody can call", sender)
        if await self._host.direct_address(sender) is not None:
            raise PeerFault("there is a direct connection already", sender)
        if sender in self._under_way and self._host.peer_id < sender:
            raise PeerFault("this peer is about to do the same", sender)
        limit = BRIDGES_LIMIT if self._host.door.is_near(sender) else BRIDGES_LIMIT // 2
        if sender in self._tasks or len(self._tasks) >= limit:
            raise PeerFault("busy", sender)
        if not self._host.calling.trusts(sender):  # nobody sees where a relayed peer is
            door = (one_spelling(request.host), request.port)
            if not self._host.calling.dialling.choose([door], None, now.monotonic_ns()):
                raise PeerFault("busy", sender)
        if len(self.asked_s) >= PEERS_REMEMBERED:
            self.asked_s.clear()
        self.asked_s[sender] = now.monotonic_s()
        if request.is_open:
            self._spawn(sender, self._call_back(sender, request))
            return encode(CalledAt("", 0))
        endpoint = self._end_to_join(request, sender)
        self._spawn(sender, self._open_and_bridge(request))
        return encode(CalledAt(*endpoint))

    def _end_to_join(self, request: CallMe, sender: str) -> Endpoint:
        """Where the world sees this peer. Raises `PeerFault` if that, or the port of its own p2pd,
        is not known, or the two ends do not have IPv4: the asker would cut the relayed connection
        in vain."""
        endpoint = self._endpoint() if self._listen_port() else None
        if endpoint is None:
            raise PeerFault("this peer does not know where the world sees it", sender)
        if ":" in request.host or ":" in endpoint[0]:
            raise PeerFault("both ends open a connection over IPv4 alone", sender)
        return endpoint

    def _spawn(self, peer_id: str, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[peer_id] = asyncio.create_task(work)
        task.add_done_callback(lambda done: self._tasks.pop(peer_id, None))

    async def _call_back(self, peer_id: str, request: CallMe) -> None:
        with contextlib.suppress(Unreachable):
            await self._host.disconnect(peer_id)
            where = tcp_address(request.host, request.port)
            await self._host.connect(peer_id, [where], OPEN_DEADLINE_S, is_chosen=True)

    async def _open_and_bridge(self, request: CallMe) -> None:
        """Open one end of a connection that both ends open, and join it to this peer's own p2pd."""
        port = self._listen_port()
        with contextlib.suppress(OSError, TimeoutError, EOFError):
            opening = _socket_at(port)
            try:
                async with asyncio.timeout(OPEN_DEADLINE_S):
                    loop = asyncio.get_running_loop()
                    await loop.sock_connect(opening, (request.host, request.port))
            except BaseException:
                opening.close()
                raise
            far = await asyncio.open_connection(sock=opening)
            try:
                near = await asyncio.open_connection("127.0.0.1", port)
                try:
                    await until_one_ends(_carry(far[0], near[1]), _carry(near[0], far[1]))
                finally:
                    near[1].close()
            finally:
                far[1].close()

    async def close(self) -> None:
        """Cut the connections that were joined here."""
        await self._control.close()
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)


def _socket_at(port: int) -> socket.socket:
    """A socket that calls from the port at which p2pd listens. The router then uses the same way
    out as for p2pd's own calls."""
    opening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    opening.setblocking(False)
    opening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    opening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        opening.bind(("0.0.0.0", port))
    except OSError:
        opening.close()
        raise
    return opening


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(_READ_BYTES):
            writer.write(data)
            await writer.drain()
