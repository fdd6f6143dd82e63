"""Bulk tensors: persistent streams for each neighbour and lane, acknowledged frame by frame.

The opener sends a hello and then frames; the acceptor answers on the same stream with one verdict
on the hello and then a cumulative count of accepted frames, or parts of frames (u64), or, in place
of a count, 2^64-1 and the reason why it hangs up. A lane has one stream, and more (`stripes`) where
the round trip is long; large frames then travel in parts. Each direction of traffic has its own
streams, so two peers that send to each other at once cannot wait for each other. Activations go
before gradients of parameters, and those before state (`lane_priority`).
"""

import asyncio
import inspect
import logging

import msgspec

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.errors import Refused, Unreachable, one_line
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.libp2p.port import HostPort, Writer
from p2p_dtfm.net.streams.bulk_settings import STRIPES_LIMIT, BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frames import (
    WHOLE,
    FrameHeader,
    Payload,
    as_bytes,
    encode_frame,
    read_frame,
)
from p2p_dtfm.net.streams.lane_priority import LanePriority
from p2p_dtfm.net.streams.reassembly import Reassembly
from p2p_dtfm.net.streams.stripes import (
    COUNT,
    HANG_UP,
    LENGTH,
    Lane,
    LaneListeners,
    read_reason,
)
from p2p_dtfm.ports import now

LANES = ("forward", "backward", "reduce", "state")
BULK_VERSION = 2
OPEN_DEADLINE_S = 10.0
STREAMS_LIMIT = 1024
_WRITE_BYTES = 1 << 18
_STREAM_BUFFER_BYTES = 1 << 20
_OFF_LOOP_BYTES = 1 << 20
_ESTIMATE_WEIGHT = 0.3
_HELLO_LIMIT_BYTES = 1024
_LINGER_S = 2.0

log = logging.getLogger(__name__)


class LaneHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first message of a bulk stream."""

    version: int
    run_digest: str
    lane: str
    session: int
    """Names this opening of the lane: a lane's later stripes say to which they belong."""
    stripe: int


class BulkPlane:
    """All bulk streams of this peer. `await ready()` before others may send.

    A frame that `listeners` admits counts in flight until it has been taken, within `room`.
    """

    def __init__(
        self,
        host: HostPort,
        run_digest: str,
        listeners: BulkListeners,
        limits: BulkLimits | None = None,
    ) -> None:
        self._limits = limits = limits or BulkLimits()
        of_one = 2 * max(limits.window_bytes, limits.frames.payload_bytes)
        self.room = ByteRoom(ByteBudget(of_one, max(of_one, limits.in_flight_bytes)))
        self._host = host
        self._run_digest = run_digest
        self._listeners = listeners
        self._outgoing: dict[tuple[str, str], Lane] = {}
        self._opening: dict[tuple[str, str], asyncio.Lock] = {}
        self._incoming: dict[tuple[str, str], _IncomingLane] = {}
        self._estimates: dict[str, float] = {}
        self._lane_priority = LanePriority()
        self._session = 0

    async def ready(self) -> "BulkPlane":
        """Start to accept streams."""
        for lane in LANES:
            await self._host.serve_streams(_protocol(lane), self._accept, f"lane {lane}")
        return self

    async def send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        """Write a frame; returns when it is written, which is before it is accepted.

        From then on the caller may change `payload`.

        Waits while `window_bytes` are unacknowledged. Raises `Refused` when the peer hung up
        with a reason and `Unreachable` when the stream broke. Frames that were written and never
        acknowledged are lost then: `on_undelivered` hears of it at once, or else the next send.
        """
        view = as_bytes(payload)
        if view.nbytes >= _OFF_LOOP_BYTES:  # the checksum of a large tensor takes milliseconds
            _, start = await asyncio.to_thread(encode_frame, header, view)
        else:
            _, start = encode_frame(header, view)
        held = await self._lane(peer_id, lane)
        shaper = self._host.shaper
        self._lane_priority.shares_uplink = bool(shaper and shaper.uplink_bytes_per_s)
        try:
            with self._lane_priority.taken(peer_id, lane):
                await held.send(header, start, view)
        except (Refused, Unreachable):
            self._forget(held)
            raise

    async def flush(self, peer_id: str, lane: str) -> None:
        """Wait until the peer has accepted all frames sent to it. Raises as `send` does."""
        held = self._outgoing.get((peer_id, lane))
        if held is None:
            return
        try:
            await held.flush()
        except (Refused, Unreachable):
            self._forget(held)
            raise

    def link_estimate(self, peer_id: str) -> int | None:
        """Bytes per second to a peer as recent large frames travelled, or None."""
        estimate = self._estimates.get(peer_id)
        return None if estimate is None else int(estimate)

    def stripe_count(self, peer_id: str, lane: str) -> int:
        """Streams that carry a lane to a peer now."""
        held = self._outgoing.get((peer_id, lane))
        return 0 if held is None else len(held.stripes)

    def unacknowledged_bytes(self, peer_id: str, lane: str) -> int:
        """What has been written of a lane and not yet been accepted."""
        held = self._outgoing.get((peer_id, lane))
        return 0 if held is None else held.unacknowledged_bytes

    def disconnect(self, peer_id: str, cause: str = "disconnected by this peer") -> None:
        """Close all streams from and to a peer; what waits for it raises `Unreachable`."""
        for (peer, _), lane in list(self._outgoing.items()):
            if peer == peer_id:
                lane.fail(Unreachable(peer_id, cause))
                self._forget(lane)
        for (peer, _), incoming in list(self._incoming.items()):
            if peer == peer_id:
                incoming.close()

    async def close(self) -> None:
        """Close everything."""
        for peer_id in {peer for peer, _ in (*self._outgoing, *self._incoming)}:
            self.disconnect(peer_id, "this peer is closing")

    # ---- outgoing

    async def _lane(self, peer_id: str, lane: str) -> Lane:
        assert lane in LANES, lane
        key = (peer_id, lane)
        async with self._opening.setdefault(key, asyncio.Lock()):
            held = self._outgoing.get(key)
            if held is not None and held.failure is not None:
                self._forget(held)
                if held.lost_frames:  # whoever sent them must hear of it, once
                    raise held.failure
                held = None
            if held is None:
                if len(self._outgoing) >= STREAMS_LIMIT:
                    raise Unreachable(peer_id, f"already {STREAMS_LIMIT} bulk streams are open")
                held = self._outgoing[key] = await self._new_lane(peer_id, lane).open()
            return held

    def _new_lane(self, peer_id: str, lane: str) -> Lane:
        self._session = max(self._session + 1, now.wall_ns())
        session, heard = self._session, self._listeners
        return Lane(
            peer_id,
            lane,
            self._limits,
            lambda stripe: self._open(
                peer_id, LaneHello(BULK_VERSION, self._run_digest, lane, session, stripe)
            ),
            LaneListeners(heard.fault, heard.lost, self._measured, heard.undelivered),
            lambda: self._lane_priority.give(peer_id, lane),
        )

    async def _open(self, peer_id: str, hello: LaneHello) -> tuple[asyncio.StreamReader, Writer]:
        name = _protocol(hello.lane)
        reader, writer = await self._host.open_stream(peer_id, name, OPEN_DEADLINE_S)
        try:
            async with asyncio.timeout(OPEN_DEADLINE_S):
                greeting = encode(hello)
                writer.write(LENGTH.pack(len(greeting)) + greeting)
                await writer.drain()
                (verdict,) = COUNT.unpack(await reader.readexactly(COUNT.size))
                if verdict:
                    raise await read_reason(reader, peer_id)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            writer.close()
            raise Unreachable(peer_id, f"no answer to a hello on {hello.lane}") from error
        except BaseException:
            writer.close()
            raise
        return reader, writer

    def _forget(self, lane: Lane) -> None:
        key = (lane.peer_id, lane.lane)
        if self._outgoing.get(key) is lane:
            del self._outgoing[key]

    def _measured(self, peer_id: str, bytes_per_s: float) -> None:
        held = self._estimates.get(peer_id, bytes_per_s)
        self._estimates[peer_id] = held + _ESTIMATE_WEIGHT * (bytes_per_s - held)

    # ---- incoming

    async def _accept(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        lane: _IncomingLane | None = None
        try:
            lane = await self._greet(sender, reader, writer)
            await self._receive(sender, lane, reader, writer)
        except PeerFault as fault:
            if lane is None or lane.fail():
                self._listeners.fault(sender, PeerFault(fault.cause, sender))
            await _hang_up(reader, writer, fault.cause)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            if lane is not None and lane.fail():
                cause = one_line(str(error) or repr(error))
                self._listeners.lost(sender, lane.name, Unreachable(sender, cause))
        except Exception:
            log.exception("bug while taking a frame from %s", sender)
            await _hang_up(reader, writer, "internal error")
        finally:
            if lane is not None:
                lane.writers.discard(writer)
                lane.close()  # its stripes live and end together
                if self._incoming.get((sender, lane.name)) is lane:
                    del self._incoming[sender, lane.name]
            writer.close()

    async def _greet(
        self, sender: str, reader: asyncio.StreamReader, writer: Writer
    ) -> "_IncomingLane":
        async with asyncio.timeout(OPEN_DEADLINE_S):
            (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
            if length > _HELLO_LIMIT_BYTES:
                raise PeerFault(f"a hello of {length} bytes")
            hello = decode(await reader.readexactly(length), LaneHello, _HELLO_LIMIT_BYTES)
        self._check(hello)
        lane = self._lane_of(sender, hello)
        lane.writers.add(writer)
        writer.write(COUNT.pack(0))
        await writer.drain()
        return lane

    def _check(self, hello: LaneHello) -> None:
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
        if not 0 <= hello.stripe < STRIPES_LIMIT or not 0 <= hello.session < 1 << 63:
            raise PeerFault(f"stripe {hello.stripe} of session {hello.session}")

    def _lane_of(self, sender: str, hello: LaneHello) -> "_IncomingLane":
        """The lane that a stream belongs to; its first stripe begins a new one."""
        key = (sender, hello.lane)
        previous = self._incoming.get(key)
        if hello.stripe:
            if previous is None or previous.session != hello.session:
                raise Superseded("a stripe of a lane that is no more")
            if len(previous.writers) >= STRIPES_LIMIT:
                raise PeerFault(f"more than {STRIPES_LIMIT} stripes")
            return previous
        if previous is None and len(self._incoming) >= STREAMS_LIMIT:
            raise PeerFault(f"already {STREAMS_LIMIT} bulk streams are open here")
        if previous is not None:  # the sender started anew; what hangs there is of its past
            previous.close()
        limit = max(self._limits.window_bytes, self._limits.frames.payload_bytes)
        lane = self._incoming[key] = _IncomingLane(
            hello.lane, hello.session, Reassembly(limit, sender, self.room)
        )
        return lane

    async def _receive(
        self, sender: str, lane: "_IncomingLane", reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        widen(reader)
        accepted = 0
        while True:
            await self._take_frame(sender, lane, reader)
            accepted += 1
            writer.write(COUNT.pack(accepted))
            async with asyncio.timeout(self._limits.stall_s):
                await writer.drain()

    async def _take_frame(
        self, sender: str, lane: "_IncomingLane", reader: asyncio.StreamReader
    ) -> None:
        taken_bytes = 0

        async def admit(header: FrameHeader) -> None:
            nonlocal taken_bytes
            self._listeners.admit(sender, lane.name, header)
            if header.part == WHOLE:  # else the whole frame counts while it is put together
                await self.room.take(sender, header.payload_bytes, self._limits.stall_s)
                taken_bytes = header.payload_bytes

        try:
            frame = await read_frame(reader, self._limits.frames, self._limits.stall_s, admit)
            if frame is None:
                raise EOFError("the sender closed the stream")
            header, payload = frame
            del frame
            if header.part == WHOLE:
                await self._deliver(sender, lane, header, payload)
            elif (whole := await lane.reassembly.add(header, payload)) is not None:
                del payload
                try:
                    await self._deliver(sender, lane, *whole)
                finally:
                    lane.reassembly.release(whole[0])
        finally:
            if taken_bytes:
                self.room.give_back(sender, taken_bytes)

    async def _deliver(
        self, sender: str, lane: "_IncomingLane", header: FrameHeader, payload: bytearray
    ) -> None:
        async with lane.turn:
            outcome = self._listeners.frame(sender, header, payload)
            if inspect.isawaitable(outcome):
                await outcome


class Superseded(EOFError):
    """A stream came too late to matter."""


class _IncomingLane:
    """The streams of one lane of one sender; the first that fails ends them all."""

    def __init__(self, name: str, session: int, reassembly: Reassembly) -> None:
        self.name = name
        self.session = session
        self.writers: set[Writer] = set()
        self.reassembly = reassembly
        self.turn = asyncio.Lock()
        self._failed = False

    def fail(self) -> bool:
        """Whether this is the first failure: the others follow from it."""
        first, self._failed = not self._failed, True
        return first

    def close(self) -> None:
        self.reassembly.close()
        for writer in self.writers:
            writer.close()


def _protocol(lane: str) -> str:
    return f"/p2p-dtfm/1/bulk/{lane}"


def widen(reader: asyncio.StreamReader) -> None:
    """Let a stream buffer as much as one read takes, or each read pauses and resumes the socket."""
    reader._limit = _STREAM_BUFFER_BYTES  # type: ignore[attr-defined]


async def _hang_up(reader: asyncio.StreamReader, writer: Writer, cause: str) -> None:
    """Say why, and wait shortly for the other side to close: closing first would lose the text."""
    text = one_line(cause).encode()[:_HELLO_LIMIT_BYTES]
    try:
        async with asyncio.timeout(_LINGER_S):
            writer.write(COUNT.pack(HANG_UP) + LENGTH.pack(len(text)) + text)
            await writer.drain()
            while await reader.read(_WRITE_BYTES):
                pass
    except (TimeoutError, *CONNECTION_ERRORS):
        return
