"""Sockets that daemons open by themselves: to see whether a peer can be called, and for their end
of a connection that both ends open.

Bytes over such a connection really pass the daemon on their way to the p2pd beside it. Here they go
from host to host, and the daemon's two sockets only last as long as the connection.
"""

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Protocol

from p2p_dtfm.net.nat import punching
from p2p_dtfm.testbed.virtual.patches import Patches

GREETING = b"\x13/multistream/1.0.0\n"
"""What every libp2p listener says first."""
LOOKS_EVERY_S = 1.0
SAYS_SOMETHING_EVERY_S = 30.0
"""libp2p's connections say something so often."""
HERE = "127.0.0.1"

MakeProtocol = Callable[[], asyncio.Protocol]


class Joined(Protocol):
    """A connection that both its ends have opened."""

    @property
    def is_live(self) -> bool: ...

    def close(self) -> None: ...


class Doors(Protocol):
    """Where peers are reached."""

    async def reach(self, host: str, port: int) -> None:
        """Calls the p2pd at that address. Raises `OSError` if it refuses, or if nothing answers in
        time."""

    async def open_both(self, host: str, port: int) -> Joined:
        """Opens a connection with the peer behind that router, as soon as that peer does the same,
        or never."""
        ...


class VirtualSocket:
    """The socket with which `net.nat.punching` opens its end."""

    joined: Joined | None = None

    def close(self) -> None:
        """Does nothing: the caller ends all that is under way."""


class Answering(asyncio.Transport):
    """A connection to a p2pd. Bytes that are written to it go another way in this world."""

    def __init__(self, protocol: asyncio.Protocol, joined: Joined | None) -> None:
        super().__init__()
        self._protocol = protocol
        self._joined = joined
        self._is_closing = False
        if joined is not None:
            self._look(SAYS_SOMETHING_EVERY_S)

    @property
    def greets(self) -> bool:
        """No connection of two hosts goes over it."""
        return self._joined is None

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Does nothing: the bytes are there already."""

    def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        if self._joined is not None:
            self._joined.close()
        asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def abort(self) -> None:
        self.close()

    def _look(self, left_s: float) -> None:
        """Looks now and then whether the joined connection still lasts, and lets it say
        something."""
        if self._is_closing or self._joined is None:
            return
        if not self._joined.is_live:
            self._protocol.eof_received()
            return
        if left_s <= 0:
            self._protocol.data_received(b"\x00")
        left_s = left_s - LOOKS_EVERY_S if left_s > 0 else SAYS_SOMETHING_EVERY_S
        asyncio.get_running_loop().call_later(LOOKS_EVERY_S, self._look, left_s)


class Sockets:
    """Answers the loop where a daemon calls a host and a port."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors

    async def call(self, opening: VirtualSocket, host: str, port: int) -> None:
        opening.joined = await self._doors.open_both(host, port)

    async def connect(
        self, make: MakeProtocol, host: str | None, port: int | None, opening: VirtualSocket | None
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Raises `OSError`."""
        protocol = make()
        if opening is not None:
            transport = Answering(protocol, opening.joined)
        elif host == HERE:  # its own p2pd, to which it joins the other end
            transport = Answering(protocol, JoinedHosts(lambda: True, lambda: None))
        else:
            assert host is not None and port is not None
            await self._doors.reach(host, port)
            transport = Answering(protocol, None)
        protocol.connection_made(transport)
        if transport.greets:
            protocol.data_received(GREETING)
        return transport, protocol


class JoinedHosts:
    """A `Joined` connection of two hosts."""

    def __init__(self, is_live: Callable[[], bool], part: Callable[[], None]) -> None:
        self._is_live = is_live
        self._part = part

    @property
    def is_live(self) -> bool:
        return self._is_live()

    def close(self) -> None:
        if self.is_live:
            contextvars.Context().run(self._part)


@contextlib.contextmanager
def no_sockets_of_this_machine() -> Iterator[None]:
    """With routers, a daemon's end of a connection that both ends open is a `VirtualSocket`."""
    patches = Patches()
    try:
        patches.put(punching, "_socket_at", lambda port: VirtualSocket())
        yield
    finally:
        patches.undo()
