"""The two ends of a stream between virtual hosts."""

import asyncio
import zlib
from collections.abc import Callable

from p2p_dtfm.net.streams.probing import LARGEST_PROBE_BYTES, PROBE_PROTOCOL

BUFFER_BYTES = 1 << 18
"""How many bytes may be under way before a writer has to wait."""
UNREAD_BYTES = 4 << 20
"""How many unread bytes a reader may have before its stream must be reset. All senders' bounds lie
below. Only a probe of a line may exceed it, where the reader is paused in the middle of one."""

TRACED_BYTES = 4096
"""How many bytes of a piece the trace covers at each end: with the length, enough to tell pieces
apart."""

Carry = Callable[[str, int, Callable[[], None]], None]


class Transport:
    """As much of a transport as the lanes ask for."""

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Does nothing: the bound is the stream's own."""


class VirtualWriter:
    """What `asyncio.StreamWriter` is to our streams. `carry` brings bytes to the far end.
    `is_damaged()` says whether some bytes of what is written now arrive changed."""

    def __init__(
        self, number: int, name: str, carry: Carry, is_damaged: Callable[[], bool]
    ) -> None:
        self.transport = Transport()
        self.reader = asyncio.StreamReader()
        """Reads what arrives at this same end."""
        self.peer: VirtualWriter | None = None
        """The other end of the stream."""
        self._number = number
        self._name = name
        self._is_probe = name.endswith(PROBE_PROTOCOL)
        self._carry = carry
        self._is_damaged = is_damaged
        self._under_way_bytes = 0
        self._room = asyncio.Event()
        self._closing = False
        self._broken = False

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other

    def is_closing(self) -> bool:
        return self._closing

    @property
    def is_over(self) -> bool:
        """Nothing goes either way any more."""
        return self._closing or self._broken

    @property
    def unread_limit_bytes(self) -> int:
        return UNREAD_BYTES + (LARGEST_PROBE_BYTES if self._is_probe else 0)

    @property
    def unread_bytes(self) -> int:
        """Bytes that came to this end, and that nobody has read."""
        return len(self.reader._buffer)  # type: ignore[attr-defined]

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._broken or not len(data):
            return
        is_damaged = not self._is_probe and self._is_damaged()
        copied = _with_a_word_changed(data) if is_damaged else bytes(data)
        self._under_way_bytes += len(copied)

        def arrive() -> None:
            self._under_way_bytes -= len(copied)
            self._room.set()
            if self.peer is not None:
                self.peer.receive(copied)

        self._carry(f"{self._name} {_seen_of(copied):08x}", len(copied), arrive)

    async def drain(self) -> None:
        while self._under_way_bytes > BUFFER_BYTES and not self._broken:
            self._room.clear()
            await self._room.wait()
        if self._broken or self._closing:
            raise ConnectionResetError("the stream was reset")

    def close(self) -> None:
        """Closes this end. What was written still arrives."""
        if self._closing:
            return
        self._closing = True
        self._room.set()
        self._end_reader()

        def arrive() -> None:
            if self.peer is not None:
                self.peer.far_end_closed()

        if not self._broken:
            self._carry(f"{self._name} end", 0, arrive)

    async def wait_closed(self) -> None:
        """Does nothing: what is closed is closed."""

    def receive(self, data: bytes) -> None:
        if not self._closing and not self._broken:
            self.reader.feed_data(data)

    def far_end_closed(self) -> None:
        self._broken = True
        self._room.set()
        self._end_reader()

    def reset(self) -> None:
        """Breaks this end: the connection is gone."""
        if self._broken or self._closing:
            return
        self._broken = True
        self._room.set()
        if not self.reader.at_eof():
            self.reader.set_exception(ConnectionResetError("the stream was reset"))

    def _end_reader(self) -> None:
        if self.reader.exception() is None:
            self.reader.feed_eof()


def _with_a_word_changed(data: bytes | bytearray | memoryview) -> bytes:
    """Changes four bytes in the middle: of a number, more than its last digits."""
    changed, middle = bytearray(data), len(data) // 2
    for place in range(middle, min(middle + 4, len(changed))):
        changed[place] ^= 0xFF
    return bytes(changed)


def _seen_of(data: bytes) -> int:
    if len(data) <= 2 * TRACED_BYTES:
        return zlib.crc32(data)
    return zlib.crc32(data[-TRACED_BYTES:], zlib.crc32(data[:TRACED_BYTES]))
