"""The port through which the rest of the program uses a host. `host.Host` is the one over
libp2p."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from p2p_dtfm.net.contacts.calling import Calling
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.door import Door
from p2p_dtfm.net.shaping import Shaper


class WriteLimits(Protocol):
    """The write limits of a stream's transport."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Set how much may wait to be sent."""


class Writer(Protocol):
    """The sending end of a stream: `asyncio.StreamWriter`, or one that is like it."""

    @property
    def transport(self) -> WriteLimits: ...

    def is_closing(self) -> bool: ...

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    async def drain(self) -> None: ...

    def close(self) -> None: ...


StreamHandler = Callable[[str, asyncio.StreamReader, Writer], Awaitable[None]]
UnaryHandler = Callable[[str, bytes], Awaitable[bytes]]


class HostPort(Protocol):
    """This peer among others."""

    @property
    def peer_id(self) -> str: ...

    @property
    def identity(self) -> Identity: ...

    @property
    def lost(self) -> asyncio.Event: ...

    @property
    def calling(self) -> Calling: ...

    @property
    def is_only_local(self) -> bool: ...

    shaper: Shaper | None
    door: Door
    found_addresses: tuple[str, ...]

    async def addresses(self) -> tuple[str, ...]: ...

    async def connect(
        self, peer_id: str, addresses: Sequence[str], deadline_s: float, is_chosen: bool = False
    ) -> None:
        """Raises `Unreachable`."""

    def know(self, peer_id: str, addresses: Sequence[str]) -> None: ...

    async def disconnect(self, peer_id: str) -> None: ...

    async def connected_peers(self) -> tuple[str, ...]: ...

    async def remote_addresses(self) -> dict[str, tuple[str, ...]]: ...

    async def direct_address(self, peer_id: str) -> str | None: ...

    async def open_stream(
        self, peer_id: str, name: str, deadline_s: float
    ) -> tuple[asyncio.StreamReader, Writer]:
        """Raises `Unreachable`."""
        ...

    async def serve_streams(self, name: str, handler: StreamHandler, kind: str = "") -> None: ...

    async def serve_calls(self, name: str, handler: UnaryHandler) -> None: ...

    async def call(self, peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
        """Raises `Unreachable`."""
        ...

    async def close(self) -> None: ...
