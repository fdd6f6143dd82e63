"""A host of the virtual network: what `net.libp2p.host.Host` is over libp2p."""

import asyncio
import contextvars
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from p2p_dtfm.net.contacts.calling import NO_WAY, Calling
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.door import Door, OpenDoor
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.p2pd import CLOSE_DEADLINE_S
from p2p_dtfm.net.shaping import Shaper
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.wires.streams import VirtualWriter

StreamHandler = Callable[[str, asyncio.StreamReader, VirtualWriter], Awaitable[None]]
UnaryHandler = Callable[[str, bytes], Awaitable[bytes]]

log = logging.getLogger(__name__)


class RelayedWay(Protocol):
    """A connection through a relay."""

    @property
    def name(self) -> str: ...

    @property
    def relay(self) -> str: ...

    def is_at(self, here: str) -> bool: ...

    def carry(
        self, origin: str, what: str, size_bytes: int, arrive: Callable[[], None]
    ) -> None: ...

    def close(self, here: str) -> None: ...


class Routed(Protocol):
    """Knows where machines are, some of them behind routers."""

    def own_address(self, peer_id: str) -> str: ...

    def seen_address(self, peer_id: str) -> str: ...

    def end_of(self, circuit_relay: str) -> str: ...

    def dial(self, host: "VirtualHost", peer_id: str, ways: Sequence[str]) -> asyncio.Task[str]: ...


class Wires(Protocol):
    """What a host needs of the virtual network."""

    @property
    def ways_in(self) -> Routed | None: ...

    def address_of(self, peer_id: str) -> str: ...

    async def shake_hands(self, host: "VirtualHost", peer_id: str, deadline_s: float) -> None: ...

    def part(self, one: str, other: str) -> None: ...

    def ask(
        self,
        host: "VirtualHost",
        peer_id: str,
        name: str,
        body: bytes,
        reply: asyncio.Future[bytes | None],
    ) -> Callable[[bool], None]: ...

    async def open_stream(
        self, host: "VirtualHost", peer_id: str, name: str, deadline_s: float
    ) -> VirtualWriter: ...

    def leave(self, host: "VirtualHost") -> None: ...


ASKS_EVERY_S = 0.25
P2PD_TAKES_S = 0.001
"""The time that p2pd takes for what it is asked. Answers that were given before have left by
then."""


class VirtualHost:
    """The host of one process. `VirtualNetwork` makes and connects it."""

    def __init__(self, network: Wires, process: Process, identity: Identity) -> None:
        self.identity = identity
        self.peer_id: str = identity.peer_id
        self.process = process
        self.lost = asyncio.Event()
        self.shaper: Shaper | None = None
        self.door: Door = OpenDoor()
        self.calling = Calling(self.remote_addresses)
        self.found_addresses: tuple[str, ...] = ()
        self.is_closed = False
        self.is_dumb = False
        """What is asked of p2pd itself is not answered, as on a machine that swaps."""
        self.linked: dict[str, None] = {}
        """The peers to which it has a direct connection."""
        self.given_up: set[str] = set()
        """Peers of `linked` whose end of the connection is gone, because this machine slept too
        long."""
        self.circuits: dict[str, list[RelayedWay]] = {}
        """Connections through relays, by the peer at the other end."""
        self.calls: dict[str, UnaryHandler] = {}
        self.streams: dict[str, tuple[StreamHandler, str]] = {}
        self.open: dict[str, list[VirtualWriter]] = {}
        """Ends of streams here, by the other end's peer, or by the circuit they go over."""
        self.asked: dict[str, dict[int, asyncio.Future[bytes | None]]] = {}
        """Calls under way, by the peer that is to answer, or by circuit."""
        self._network = network
        self._address_book: dict[str, tuple[str, ...]] = {}
        self._dials: dict[str, asyncio.Task[str]] = {}
        """Dials under way. p2pd calls a peer once, whoever asks for it."""

    @property
    def is_only_local(self) -> bool:
        return self._network.ways_in is None

    @property
    def address(self) -> str:
        return self._network.address_of(self.peer_id)

    @property
    def is_gone(self) -> bool:
        return self.is_closed or self.process.is_dead

    async def _ask(self) -> None:
        """Waits while p2pd does not answer. Raises `Unreachable` when that takes too long."""
        waited_s = 0.0
        while self.is_dumb:
            if waited_s >= CLOSE_DEADLINE_S:
                raise Unreachable(self.peer_id, f"no answer within {CLOSE_DEADLINE_S:g} s")
            await asyncio.sleep(ASKS_EVERY_S)
            waited_s += ASKS_EVERY_S

    async def addresses(self) -> tuple[str, ...]:
        await self._ask()
        return (*self.found_addresses, f"{self.address}/p2p/{self.peer_id}")

    # connections ---------------------------------------------------------------------------------

    def is_linked(self, peer_id: str) -> bool:
        return peer_id in self.linked or peer_id in self.circuits

    @property
    def linked_peers(self) -> list[str]:
        return sorted({**self.linked, **self.circuits})

    async def connect(
        self, peer_id: str, addresses: Sequence[str], deadline_s: float, is_chosen: bool = False
    ) -> None:
        """Raises `Unreachable`."""
        self._require_alive(peer_id)
        if self.is_linked(peer_id):
            return
        if not is_chosen and not self.calling.trusts(peer_id):
            addresses = self.calling.choose(peer_id, addresses)
        if self._network.ways_in is not None:
            await self._dial(self._network.ways_in, peer_id, addresses, deadline_s)
        elif addresses and not any(self._network.address_of(peer_id) in at for at in addresses):
            raise Unreachable(peer_id, "nobody of that name is there")
        else:
            await self._network.shake_hands(self, peer_id, deadline_s)
        await self.calling.answered(peer_id)

    async def _dial(
        self, ways_in: Routed, peer_id: str, addresses: Sequence[str], deadline_s: float
    ) -> None:
        dial = self._dials.get(peer_id)
        if dial is None:
            dial = self._dials[peer_id] = ways_in.dial(self, peer_id, addresses)
            nobody = contextvars.Context()
            dial.add_done_callback(lambda done: self._dials.pop(peer_id), context=nobody)
        await asyncio.wait({dial}, timeout=deadline_s)
        if not dial.done():
            raise Unreachable(peer_id, f"no connection within {deadline_s:g} s")
        if cause := dial.result():
            raise Unreachable(peer_id, cause)

    def know(self, peer_id: str, addresses: Sequence[str]) -> None:
        self._address_book[peer_id] = tuple(addresses)

    async def disconnect(self, peer_id: str) -> None:
        await self._ask()
        await asyncio.sleep(P2PD_TAKES_S)
        for way in list(self.circuits.get(peer_id, ())):
            way.close(self.peer_id)
        if peer_id in self.linked:
            self._network.part(self.peer_id, peer_id)

    async def connected_peers(self) -> tuple[str, ...]:
        await self._ask()
        return tuple(self.linked_peers)

    async def remote_addresses(self) -> dict[str, tuple[str, ...]]:
        await self._ask()
        return {peer: self._ends_at(peer) for peer in self.linked_peers}

    def _ends_at(self, peer_id: str) -> tuple[str, ...]:
        """Addresses at the far ends of connections to the peer, as p2pd says them: the direct one
        first."""
        ways_in = self._network.ways_in
        if ways_in is None:
            return (self._network.address_of(peer_id),)
        direct = [ways_in.seen_address(peer_id)] if peer_id in self.linked else []
        relays = [way.relay for way in self.circuits.get(peer_id, ())]
        return (*direct, *map(ways_in.end_of, relays))

    async def direct_address(self, peer_id: str) -> str | None:
        await self._ask()
        return self._ends_at(peer_id)[0] if peer_id in self.linked else None

    async def _ensure_linked(self, peer_id: str, deadline_s: float) -> None:
        self._require_alive(peer_id)
        if self.is_linked(peer_id):
            return
        known = self._address_book.get(peer_id)
        if known is None:
            raise Unreachable(peer_id, NO_WAY)
        await self.connect(peer_id, known, deadline_s)

    def _require_alive(self, peer_id: str) -> None:
        if self.is_closed or self.lost.is_set():
            raise Unreachable(peer_id, "the libp2p daemon of this peer has ended")

    # calls and streams ---------------------------------------------------------------------------

    async def serve_calls(self, name: str, handler: UnaryHandler) -> None:
        self.calls[name] = handler

    async def serve_streams(self, name: str, handler: StreamHandler, kind: str = "") -> None:
        self.streams[name] = (handler, kind or name)

    async def call(self, peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
        """Raises `Unreachable`."""
        await self._ensure_linked(peer_id, deadline_s)
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[bytes | None] = loop.create_future()
        forget = self._network.ask(self, peer_id, name, body, reply)
        timer = loop.call_later(deadline_s, _answer_nothing, reply)
        is_over = False
        try:
            content = await reply
            is_over = content is not None
        except Unreachable:
            is_over = True
            raise
        finally:
            timer.cancel()
            forget(is_over)
        if content is None:
            raise Unreachable(peer_id, f"no answer within {deadline_s:g} s")
        return content

    async def open_stream(
        self, peer_id: str, name: str, deadline_s: float
    ) -> tuple[asyncio.StreamReader, VirtualWriter]:
        """Raises `Unreachable`."""
        await self._ensure_linked(peer_id, deadline_s)
        writer = await self._network.open_stream(self, peer_id, name, deadline_s)
        return writer.reader, writer

    async def serve(self, sender: str, name: str, writer: VirtualWriter) -> None:
        """Serves a stream that `sender` has opened."""
        handler, kind = self.streams[name]
        leave = self.door.enter(sender, kind, 0)
        if isinstance(leave, str):
            writer.close()
            return
        try:
            await handler(sender, writer.reader, writer)
        except Exception as error:
            self.process.failures.append(f"bug in the stream handler {name}: {error!r}")
            raise
        finally:
            leave()
            writer.close()

    async def close(self) -> None:
        self._network.leave(self)


def _answer_nothing(reply: asyncio.Future[bytes | None]) -> None:
    """The time for the answer is over."""
    if not reply.done():
        reply.set_result(None)
