"""The two ends of a shaped stream: the sender keeps to its link's rate, and the receiver delays
what it hears."""

import asyncio
import collections
import struct
from typing import Protocol

from p2p_dtfm.net.shaping.fine_timer import until
from p2p_dtfm.net.shaping.links import LATE_LIMIT_S, ShapedPath, chunk_bytes
from p2p_dtfm.ports import now

SEND_BUFFER_BYTES = 1 << 18
"""Bytes that a sender may have written of a stream and that have not left yet, as in a socket's
buffer."""
_RAW_BUFFER_BYTES = 1 << 20
STAMP = struct.Struct(">Id")
"""How many bytes follow, and when they left."""


class Receiver(Protocol):
    """The peer whose downlink the bytes of a stream come in by."""

    stamps: bool
    downlink_bytes_per_s: int

    def latency_s(self, origin: str) -> float: ...

    async def come(self, due_s: float, size_bytes: int) -> None:
        """Wait until bytes that are due at `due_s` are in."""


class ShapedWriter:
    """Stands in for `asyncio.StreamWriter`, with a socket's small buffer. So the link does not idle
    while its sender prepares the next piece. What is written is copied."""

    def __init__(
        self, link: ShapedPath, raw: asyncio.StreamWriter, arrivals: "Arrivals", stamps: bool
    ) -> None:
        raw.transport.set_write_buffer_limits(high=0)
        self._stamps = stamps
        self._link = link
        self._raw = raw
        self._arrivals = arrivals
        self._written: collections.deque[tuple[float, bytes]] = collections.deque()
        self._written_bytes = 0
        self._sending: asyncio.Task[None] | None = None
        self._room = asyncio.Event()
        self._error: Exception | None = None
        self._closing = False

    @property
    def transport(self) -> asyncio.WriteTransport:
        return self._raw.transport

    def is_closing(self) -> bool:
        return self._closing or self._raw.is_closing()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._closing or self._error is not None or not len(data):
            return
        self._written.append((now.monotonic_s(), bytes(data)))
        self._written_bytes += len(data)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="shaped stream")

    async def drain(self) -> None:
        """Wait until at most `SEND_BUFFER_BYTES` have not left yet."""
        while self._written_bytes > SEND_BUFFER_BYTES and self._error is None:
            self._room.clear()
            await self._room.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """As with asyncio, what was written still leaves."""
        self._closing = True
        if self._sending is None:
            self._end()

    def _end(self) -> None:
        self._raw.close()
        self._arrivals.stop()

    async def _send(self) -> None:
        try:
            while self._written:
                written_s, data = self._written[0]
                size = self._link.chunk_bytes  # the link may change meanwhile
                for start in range(0, len(data), size):
                    part = memoryview(data)[start : start + size]
                    ready_s = max(written_s, now.monotonic_s() - LATE_LIMIT_S)
                    left_s = await self._link.carry(len(part), ready_s)
                    stamp = STAMP.pack(len(part), left_s) if self._stamps else b""
                    self._raw.write(b"".join((stamp, self._link.as_it_arrives(part))))
                    await self._raw.drain()
                    self._written_bytes -= len(part)
                    self._room.set()
                self._written.popleft()
        except (OSError, EOFError, RuntimeError) as error:
            self._error = error
        finally:
            self._sending = None
            self._room.set()
            if self._closing:
                self._end()


class Arrivals:
    """Moves bytes from the real stream to one that a distant receiver would read."""

    def __init__(
        self, receiver: Receiver, origin: str, bound_bytes: int, raw: asyncio.StreamReader
    ) -> None:
        raw._limit = _RAW_BUFFER_BYTES  # type: ignore[attr-defined]
        self.reader = asyncio.StreamReader()
        self.held_bytes = 0
        self._receiver = receiver
        self._origin = origin
        self._bound_bytes = bound_bytes
        self._raw = raw
        self._stamps = Stamps() if receiver.stamps else None
        self._valve = _Valve()
        self.reader.set_transport(self._valve)
        self._coming: collections.deque[tuple[float, bytes | Exception]] = collections.deque()
        self._changed = asyncio.Condition()
        self._tasks = [
            asyncio.create_task(self._take(), name="shaped stream, arriving"),
            asyncio.create_task(self._release(), name="shaped stream, delayed"),
        ]

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._coming.clear()
        if not self.reader.at_eof():
            self.reader.feed_eof()

    async def _take(self) -> None:
        most = chunk_bytes(self._receiver.downlink_bytes_per_s)
        data: bytes | Exception = b"?"
        while data and not isinstance(data, Exception):
            async with self._changed:
                await self._changed.wait_for(lambda: self.held_bytes < self._bound_bytes)
            try:
                data = await self._raw.read(most)
            except (OSError, EOFError, RuntimeError) as error:
                data = error
            latency_s = self._receiver.latency_s(self._origin)
            pieces: list[tuple[float, bytes | Exception]] = [(now.monotonic_s(), data)]
            if self._stamps is not None and isinstance(data, bytes) and data:
                pieces = self._stamps.split(data)
            async with self._changed:
                self.held_bytes += sum(len(p) for _, p in pieces if isinstance(p, bytes))
                self._coming.extend((left_s + latency_s, piece) for left_s, piece in pieces)
                self._changed.notify_all()

    async def _release(self) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: bool(self._coming))
                due_s, data = self._coming[0]
            await until(due_s)
            if isinstance(data, Exception):
                self.reader.set_exception(data)
                return
            if not data:
                self.reader.feed_eof()
                return
            await self._receiver.come(due_s, len(data))
            await self._valve.open.wait()
            self.reader.feed_data(data)
            async with self._changed:
                self._coming.popleft()
                self.held_bytes -= len(data)
                self._changed.notify_all()


class Stamps:
    """A stamped stream as it comes in."""

    def __init__(self) -> None:
        self._stamp = bytearray()
        self._left_s = 0.0
        self._left_bytes = 0

    def split(self, data: bytes) -> list[tuple[float, bytes | Exception]]:
        """The pieces, each with the time at which it left, which is never later than now."""
        found: list[tuple[float, bytes | Exception]] = []
        view, now_s = memoryview(data), now.monotonic_s()
        while view:
            if self._left_bytes:
                found.append((min(self._left_s, now_s), bytes(view[: self._left_bytes])))
                taken = min(self._left_bytes, len(view))
                self._left_bytes -= taken
            else:
                taken = min(STAMP.size - len(self._stamp), len(view))
                self._stamp += view[:taken]
                if len(self._stamp) == STAMP.size:
                    self._left_bytes, self._left_s = STAMP.unpack(self._stamp)
                    self._stamp.clear()
            view = view[taken:]
        return found


class _Valve(asyncio.ReadTransport):
    """Closed by a `StreamReader` while nobody reads what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        self.open.clear()

    def resume_reading(self) -> None:
        self.open.set()
