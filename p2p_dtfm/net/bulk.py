"""Bulk tensors: one persistent stream for each neighbour and lane, acknowledged frame by frame.

The opener sends a hello and then frames; the acceptor answers on the same stream with one verdict
on the hello and then a cumulative count of accepted frames (u64), or, in place of a count, 2^64-1
and the reason why it hangs up. Each direction of traffic has its own stream, so two peers that
send to each other at once cannot wait for each other.
"""

import asyncio
import collections
import inspect
import logging
import struct
import time
from collections.abc import Awaitable, Callable

import msgspec

from p2p_dtfm.core.canonical import decode, encode
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.net.errors import Refused, Unreachable, one_line
from p2p_dtfm.net.frames import (
    FrameHeader,
    FrameLimits,
    Payload,
    as_bytes,
    encode_frame,
    read_frame,
)
from p2p_dtfm.net.host import CONNECTION_ERRORS, Host, Writer

OnFrame = Callable[[str, FrameHeader, bytearray], Awaitable[None] | None]
OnFault = Callable[[str, PeerFault], None]
OnLost = Callable[[str, str, Unreachable], None]

LANES = ("forward", "backward", "reduce", "state")
BULK_VERSION = 1
OPEN_DEADLINE_S = 10.0
STALL_S = 60.0
WINDOW_BYTES = 64 << 20
STREAMS_LIMIT = 1024
_WRITE_BYTES = 1 << 18
_JOINED_BYTES = 1 << 14
_STREAM_BUFFER_BYTES = 1 << 20
_OFF_LOOP_BYTES = 1 << 20
_ESTIMATE_MINIMUM_BYTES = 1 << 18
_ESTIMATE_WEIGHT = 0.3
_HELLO_LIMIT_BYTES = 1024
_LINGER_S = 2.0
_LAST_WORD_S = 0.2
_COUNT = struct.Struct(">Q")
_LENGTH = struct.Struct(">H")
_HANG_UP = (1 << 64) - 1

log = logging.getLogger(__name__)


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first message of a bulk stream."""

    version: int
    run_digest: str
    lane: str


class BulkPlane:
    """All bulk streams of this peer. `await ready()` before others may send.

    `on_frame(sender, header, payload)` takes a frame; while it (or what it returns) waits, that
    lane of that sender waits too. A `PeerFault` from it ends the stream and reaches the sender as
    `Refused`; `on_fault(sender, fault)` hears of every such end. `on_lost(peer_id, lane, error)`
    hears of streams that broke, in either direction.
    """

    def __init__(
        self,
        host: Host,
        run_digest: str,
        limits: FrameLimits,
        on_frame: OnFrame,
        on_fault: OnFault,
        on_lost: OnLost | None = None,
        window_bytes: int = WINDOW_BYTES,
        stall_s: float = STALL_S,
    ) -> None:
        self._host = host
        self._run_digest = run_digest
        self._limits = limits
        self._on_frame = on_frame
        self._on_fault = on_fault
        self._on_lost = on_lost
        self._window_bytes = window_bytes
        self._stall_s = stall_s
        self._outgoing: dict[tuple[str, str], _Outgoing] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._incoming: dict[tuple[str, str], Writer] = {}
        self._estimates: dict[str, float] = {}

    async def ready(self) -> "BulkPlane":
        """Start to accept streams."""
        for lane in LANES:
            await self._host.serve_streams(_protocol(lane), self._accept)
        return self

    async def send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        """Write a frame; returns when it is written, which is before it is accepted.

        From then on the caller may change `payload`.

        Waits while `window_bytes` are unacknowledged. Raises `Refused` when the peer hung up
        with a reason and `Unreachable` when the stream broke: also once for earlier frames that
        were written and never acknowledged, which are lost.
        """
        view = as_bytes(payload)
        if view.nbytes >= _OFF_LOOP_BYTES:  # the checksum of a large tensor takes milliseconds
            _, start = await asyncio.to_thread(encode_frame, header, view)
        else:
            _, start = encode_frame(header, view)
        stream = await self._stream(peer_id, lane)
        await stream.send(start, view)

    async def flush(self, peer_id: str, lane: str) -> None:
        """Wait until the peer has accepted all frames sent to it. Raises as `send` does."""
        stream = self._outgoing.get((peer_id, lane))
        if stream is None:
            return
        try:
            await stream.flush()
        except (Refused, Unreachable):
            self._forget(stream)
            raise

    def link_estimate(self, peer_id: str) -> int | None:
        """Bytes per second to a peer as recent large frames travelled, or None."""
        estimate = self._estimates.get(peer_id)
        return None if estimate is None else int(estimate)

    def disconnect(self, peer_id: str, cause: str = "disconnected by this peer") -> None:
        """Close all streams from and to a peer; what waits for it raises `Unreachable`."""
        for (peer, _), stream in list(self._outgoing.items()):
            if peer == peer_id:
                stream.fail(Unreachable(peer_id, cause))
                self._forget(stream)
        for (peer, _), writer in list(self._incoming.items()):
            if peer == peer_id:
                writer.close()

    async def close(self) -> None:
        """Close everything."""
        for peer_id in {peer for peer, _ in (*self._outgoing, *self._incoming)}:
            self.disconnect(peer_id, "this peer is closing")

    # ---- outgoing

    async def _stream(self, peer_id: str, lane: str) -> "_Outgoing":
        assert lane in LANES, lane
        key = (peer_id, lane)
        async with self._opening.setdefault(key, asyncio.Lock()):
            stream = self._outgoing.get(key)
            if stream is not None and stream.failure is not None:
                self._forget(stream)
                if stream.lost_frames:  # whoever sent them must hear of it, once
                    raise stream.failure
                stream = None
            if stream is None:
                if len(self._outgoing) >= STREAMS_LIMIT:
                    raise Unreachable(peer_id, f"already {STREAMS_LIMIT} bulk streams are open")
                stream = self._outgoing[key] = await self._open(peer_id, lane)
            return stream

    async def _open(self, peer_id: str, lane: str) -> "_Outgoing":
        reader, writer = await self._host.open_stream(peer_id, _protocol(lane), OPEN_DEADLINE_S)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                hello = encode(Hello(BULK_VERSION, self._run_digest, lane))
                writer.write(_LENGTH.pack(len(hello)) + hello)
                await writer.drain()
                (verdict,) = _COUNT.unpack(await reader.readexactly(_COUNT.size))
                if verdict:
                    raise await _reason(reader, peer_id)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            writer.close()
            raise Unreachable(peer_id, f"no answer to a hello on {lane}") from error
        except BaseException:
            writer.close()
            raise
        return _Outgoing(self, peer_id, lane, reader, writer)

    def _forget(self, stream: "_Outgoing") -> None:
        key = (stream.peer_id, stream.lane)
        if self._outgoing.get(key) is stream:
            del self._outgoing[key]

    def _measured(self, peer_id: str, frame_bytes: int, elapsed_s: float) -> None:
        if frame_bytes < _ESTIMATE_MINIMUM_BYTES or elapsed_s <= 0:
            return
        rate = frame_bytes / elapsed_s
        held = self._estimates.get(peer_id, rate)
        self._estimates[peer_id] = held + _ESTIMATE_WEIGHT * (rate - held)

    def _report_lost(self, peer_id: str, lane: str, error: Unreachable) -> None:
        if self._on_lost is not None:
            self._on_lost(peer_id, lane, error)

    # ---- incoming

    async def _accept(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        lane = ""
        try:
            lane = await self._greet(sender, reader, writer)
            await self._receive(sender, lane, reader, writer)
        except PeerFault as fault:
            self._on_fault(sender, PeerFault(fault.cause, sender))
            await _hang_up(reader, writer, fault.cause)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            if lane:
                cause = one_line(str(error) or repr(error))
                self._report_lost(sender, lane, Unreachable(sender, cause))
        except Exception:
            log.exception("bug while taking a frame from %s", sender)
            await _hang_up(reader, writer, "internal error")
        finally:
            if self._incoming.get((sender, lane)) is writer:
                del self._incoming[sender, lane]
            writer.close()

    async def _greet(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> str:
        async with asyncio.timeout(OPEN_DEADLINE_S):
            (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
            if length > _HELLO_LIMIT_BYTES:
                raise PeerFault(f"a hello of {length} bytes")
            hello = decode(await reader.readexactly(length), Hello, _HELLO_LIMIT_BYTES)
        if hello.version != BULK_VERSION:
            raise PeerFault(
                f"bulk protocol {hello.version} meets {BULK_VERSION}: one of the two must update"
            )
        if hello.run_digest != self._run_digest:
            raise PeerFault(
                f"run {one_line(hello.run_digest[:12])} meets run {self._run_digest[:12]}"
            )
        if hello.lane not in LANES:
            raise PeerFault(f"the unknown lane {one_line(hello.lane[:32])!r}")
        key = (sender, hello.lane)
        previous = self._incoming.get(key)
        if previous is None and len(self._incoming) >= STREAMS_LIMIT:
            raise PeerFault(f"already {STREAMS_LIMIT} bulk streams are open here")
        if previous is not None:  # the sender started anew; what hangs there is of its past
            previous.close()
        self._incoming[key] = writer
        writer.write(_COUNT.pack(0))
        await writer.drain()
        return hello.lane

    async def _receive(
        self, sender: str, lane: str, reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        widen(reader)
        accepted = 0
        while True:
            frame = await read_frame(reader, self._limits, self._stall_s)
            if frame is None:
                raise EOFError("the sender closed the stream")
            outcome = self._on_frame(sender, *frame)
            del frame
            if inspect.isawaitable(outcome):
                await outcome
            accepted += 1
            writer.write(_COUNT.pack(accepted))
            async with asyncio.timeout(self._stall_s):
                await writer.drain()


class _Outgoing:
    """One stream that this peer opened."""

    def __init__(
        self,
        plane: BulkPlane,
        peer_id: str,
        lane: str,
        reader: asyncio.StreamReader,
        writer: Writer,
    ) -> None:
        self.peer_id = peer_id
        self.lane = lane
        self.failure: Refused | Unreachable | None = None
        self.lost_frames = 0
        self._plane = plane
        self._reader = reader
        self._writer = writer
        # a drain then means that nothing of the caller's payload is referred to any more
        writer.transport.set_write_buffer_limits(high=0)
        self._write_lock = asyncio.Lock()
        self._waiting: collections.deque[tuple[int, float]] = collections.deque()
        """(bytes, time of the first write) of each frame not yet acknowledged."""
        self._unacknowledged_bytes = 0
        self._acknowledged = 0
        self._last_acknowledgement_s = 0.0
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read_acknowledgements(), name=f"acks {lane}")

    async def send(self, start: bytes, payload: memoryview) -> None:
        frame_bytes = len(start) + payload.nbytes
        async with self._write_lock:
            window = self._plane._window_bytes
            await self._until(
                lambda: not self._waiting or self._unacknowledged_bytes + frame_bytes <= window
            )
            self._waiting.append((frame_bytes, time.monotonic()))
            self._unacknowledged_bytes += frame_bytes
            try:
                await self._write(start, payload)
            except (TimeoutError, *CONNECTION_ERRORS) as error:
                # the reader may be about to hear why
                await asyncio.wait({self._reading}, timeout=_LAST_WORD_S)
                self.fail(Unreachable(self.peer_id, one_line(str(error) or "the stream stalled")))
                self._plane._forget(self)
                assert self.failure is not None
                raise self.failure from error
            except BaseException:  # cancelled in the middle of a frame: the stream is of no use
                self.fail(Unreachable(self.peer_id, "a send was cancelled halfway"))
                self.lost_frames -= 1  # its sender knows
                raise

    async def flush(self) -> None:
        await self._until(lambda: not self._waiting)

    def fail(self, failure: Refused | Unreachable) -> None:
        """The first failure counts; everybody who waits hears of it."""
        if self.failure is None:
            self.failure = failure
            self.lost_frames = len(self._waiting)
            self._writer.close()
            if asyncio.current_task() is not self._reading:
                self._reading.cancel()
            self._changed.set()

    async def _write(self, start: bytes, payload: memoryview) -> None:
        first = min(payload.nbytes, _JOINED_BYTES)  # small frames in one write
        await self._write_part(start + payload[:first])
        for offset in range(first, payload.nbytes, _WRITE_BYTES):
            await self._write_part(payload[offset : offset + _WRITE_BYTES])

    async def _write_part(self, part: bytes | memoryview) -> None:
        self._require_whole()
        self._writer.write(part)
        async with asyncio.timeout(self._plane._stall_s):
            await self._writer.drain()

    def _require_whole(self) -> None:
        if self.failure is not None:
            raise ConnectionResetError(self.failure.cause)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while self.failure is None and not condition():
            self._changed.clear()
            await self._changed.wait()
        if self.failure is not None:
            self._plane._forget(self)
            raise self.failure

    async def _read_acknowledgements(self) -> None:
        try:
            while True:
                (count,) = _COUNT.unpack(await self._reader.readexactly(_COUNT.size))
                if count == _HANG_UP:
                    self.fail(await _reason(self._reader, self.peer_id))
                    return
                self._acknowledge(count)
        except PeerFault as fault:
            self.fail(Refused(fault.cause, self.peer_id))
            self._plane._on_fault(self.peer_id, fault)
        except CONNECTION_ERRORS:
            unreachable = Unreachable(self.peer_id, f"the {self.lane} stream to it broke")
            self.fail(unreachable)
            self._plane._report_lost(self.peer_id, self.lane, unreachable)

    def _acknowledge(self, count: int) -> None:
        if not self._acknowledged < count <= self._acknowledged + len(self._waiting):
            raise PeerFault(f"acknowledged {count} frames", self.peer_id)
        now = time.monotonic()
        while self._acknowledged < count:
            frame_bytes, first_write_s = self._waiting.popleft()
            self._unacknowledged_bytes -= frame_bytes
            self._acknowledged += 1
            # a frame that queued behind others began to travel when the last of them arrived
            began = max(first_write_s, self._last_acknowledgement_s)
            self._plane._measured(self.peer_id, frame_bytes, now - began)
        self._last_acknowledgement_s = now
        self._changed.set()


def _protocol(lane: str) -> str:
    return f"/p2p-dtfm/1/bulk/{lane}"


def widen(reader: asyncio.StreamReader) -> None:
    """Let a stream buffer as much as one read takes, or each read pauses and resumes the socket."""
    reader._limit = _STREAM_BUFFER_BYTES  # type: ignore[attr-defined]


async def _reason(reader: asyncio.StreamReader, peer_id: str) -> Refused:
    async with asyncio.timeout(_LINGER_S):
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        text = await reader.readexactly(min(length, _HELLO_LIMIT_BYTES))
    return Refused(one_line(text.decode(errors="replace")), peer_id)


async def _hang_up(reader: asyncio.StreamReader, writer: Writer, cause: str) -> None:
    """Say why, and wait shortly for the other side to close: closing first would lose the text."""
    text = one_line(cause).encode()[:_HELLO_LIMIT_BYTES]
    try:
        async with asyncio.timeout(_LINGER_S):
            writer.write(_COUNT.pack(_HANG_UP) + _LENGTH.pack(len(text)) + text)
            await writer.drain()
            while await reader.read(_WRITE_BYTES):
                pass
    except (TimeoutError, *CONNECTION_ERRORS):
        return
