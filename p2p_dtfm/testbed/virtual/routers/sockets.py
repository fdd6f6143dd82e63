"""Sockets that daemons open by themselves: to see whether somebody can be called, and for one end
of a connection that both ends open.

What goes over such a connection passes the daemon that has opened it, on its way to the p2pd beside
it. Here it goes from host to host, and the daemon's two sockets only last as long as it does.
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
"""libp2p's connections do."""
HERE = "127.0.0.1"

MakeProtocol = Callable[[], asyncio.Protocol]


class Joined(Protocol):
    """A connection that both of its ends have opened."""

    @property
    def is_live(self) -> bool: ...

    def close(self) -> None: ...


class Doors(Protocol):
    """Where others are reached."""

    async def reach(self, host: str, port: int) -> None:
        """Somebody's p2pd. Raises `OSError` where none answers, if anybody says so."""

    async def open_both(self, host: str, port: int) -> Joined:
        """With the one behind that router, as soon as it does the same: or never."""
        ...


class VirtualSocket:
    """What `net.nat.punching` opens its end with."""

    joined: Joined | None = None

    def close(self) -> None:
        """Nothing is under way that its caller does not end."""


class Answering(asyncio.Transport):
    """A connection to a p2pd. What is written to it goes another way here."""

    def __init__(self, protocol: asyncio.Protocol, joined: Joined | None) -> None:
        super().__init__()
        self._protocol = protocol
        self._joined = joined
        self._is_closing = False
        if joined is not None:
            self._look(SAYS_SOMETHING_EVERY_S)

    @property
    def greets(self) -> bool:
        """Nobody's connection goes over it."""
        return self._joined is None

    def is_closing(self) -> bool:
        return self._is_closing

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """It is there already."""

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
        """Whether the connection of which this is a part lasts, and says something."""
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
    """What the loop asks for."""

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
    """`Joined` of two hosts, as they see it."""

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
    """Where some are behind routers a daemon's end of what both open is one of this world."""
    patches = Patches()
    try:
        patches.put(punching, "_socket_at", lambda port: VirtualSocket())
        yield
    finally:
        patches.undo()
