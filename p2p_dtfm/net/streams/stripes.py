"""The sending side of a lane: one stream, or several where one cannot fill a long link.

A stream has only so many bytes under way. So over a long round trip it carries window / round trip,
however fast the link is. A lane therefore doubles its streams while it is busy, the round trip is
long, and the last doubling helped.
"""

import asyncio
import collections
import contextlib
import struct
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.net.direct.line_jobs import RightOfWay
from p2p_dtfm.net.errors import Refused, Unreachable, one_line
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.streams.bulk_settings import IDLE_S, BulkLimits, LaneListeners
from p2p_dtfm.net.streams.frames import PART_BYTES, FrameHeader, encode_part
from p2p_dtfm.net.streams.wire import Way, Wire, read_reason, start_of
from p2p_dtfm.ports import now

LONG_ROUND_TRIP_S = 0.01
HELPED = 1.05
PATIENCE = 2
"""Doublings in a row that may fail before a lane settles: other traffic disturbs the judge."""
HELD_BACK_TIMES = 3
_BUSY_S = 0.5
_BUSY_ROUND_TRIPS = 4
_SPLIT_BYTES = 4 * PART_BYTES
_ESTIMATE_BYTES = 1 << 18
_ESTIMATE_S = 0.05
_BLOCKED_S = 0.002
_BUFFERED_BYTES = 1 << 20
"""Bytes of a stream that libp2p takes before the link has carried them."""
_LAST_WORD_S = 0.2
COUNT = struct.Struct(">Q")
HANG_UP = (1 << 64) - 1

Failure = Refused | Unreachable
OpenStripe = Callable[[int], Awaitable[Wire]]


class Lane:
    """All streams of one lane to one peer, which live and fail together."""

    def __init__(
        self,
        whose: tuple[str, str],
        way: Way,
        limits: BulkLimits,
        open_stripe: OpenStripe,
        listeners: LaneListeners,
        turn: RightOfWay,
    ) -> None:
        """`whose`: the peer, and which of its lanes. `turn` is asked before each write."""
        self.turn = turn
        self.peer_id, self.lane = whose
        self.way = way
        """What carries the lane's streams."""
        self.most_stripes = min(limits.most_stripes, way.most_stripes)
        self.failure: Failure | None = None
        self.gives_way = False
        """Another lane is being opened in its place, so the receiver may close this one first."""
        self.lost_frames = 0
        self.used_s = now.monotonic_s()
        """When anything was sent last."""
        self.stripes: list[Stripe] = []
        self.limits = limits
        self.listeners = listeners
        self.unacknowledged_bytes = 0
        self.changed = asyncio.Event()
        self._open_stripe = open_stripe
        self._turn = asyncio.Lock()
        self._frames = 0
        self._sending = 0
        self._growth = Growth()
        self._growing: asyncio.Task[None] | None = None

    async def open(self) -> "Lane":
        """Open the first stream. Raises `Refused` or `Unreachable`."""
        began_s = now.monotonic_s()
        self.stripes.append(Stripe(self, await self._open_stripe(0)))
        # no frame is acknowledged faster than this where large ones queue in libp2p's buffers
        self.stripes[0].round_trip_s = now.monotonic_s() - began_s
        return self

    @property
    def round_trip_s(self) -> float:
        """The shortest time from the end of a write to its acknowledgement, a hello included."""
        times = [s.round_trip_s for s in self.stripes if s.round_trip_s]
        return min(times, default=0.0)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being sent, and all that was sent is acknowledged."""
        return not self._sending and not any(stripe.waiting for stripe in self.stripes)

    async def quiet(self) -> None:
        """Wait until the lane is quiet. Raises `Refused` or `Unreachable` once it has failed."""
        await self.until(lambda: self.is_quiet)

    def broke(self) -> None:
        """Note that a stream ended without a word."""
        unreachable = Unreachable(self.peer_id, f"the {self.lane} stream to it broke")
        is_idle = self.is_quiet and now.monotonic_s() - self.used_s >= IDLE_S
        self.fail(unreachable)
        if not is_idle:  # a peer with too many lanes ends idle ones, and loses nothing
            self.listeners.lost(self.peer_id, self.lane, unreachable)

    def stays(self) -> None:
        """Note that no other lane takes its place after all."""
        self.gives_way = False
        if self.failure is None and any(stripe.reading.done() for stripe in self.stripes):
            self.broke()

    def retire(self) -> None:
        """End a quiet lane whose place is needed, or taken: nobody has lost anything."""
        assert self.is_quiet, "frames are under way"
        if self._growing is not None:
            self._growing.cancel()
        for stripe in self.stripes:
            stripe.close()

    async def send(self, header: FrameHeader, payload: memoryview) -> None:
        """Write a frame."""
        self._sending += 1
        try:
            await self._send(header, payload)
        finally:
            self._sending -= 1
            self.used_s = now.monotonic_s()
            self.changed.set()

    async def _send(self, header: FrameHeader, payload: memoryview) -> None:
        splits = len(self.stripes) > 1 and payload.nbytes >= _SPLIT_BYTES
        with_checksum = not self.stripes[0].wire.seals
        start = b"" if splits else await start_of(header, payload, with_checksum)
        self._frames += 1
        frame = self._frames
        try:
            if splits:
                with self._busy(payload.nbytes):
                    await self._send_parts(header, frame, payload)
            else:
                stripe = min(self.stripes, key=lambda stripe: stripe.load_bytes)
                with self._busy(payload.nbytes):
                    await stripe.send(frame, header.view, start, payload)
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            await self._hear_last_word()
            self.fail(Unreachable(self.peer_id, one_line(str(error) or "the stream stalled")))
            assert self.failure is not None
            self.lost_frames = 0  # the sender hears of it now
            raise self.failure from error
        except (Refused, Unreachable):
            raise
        except BaseException:  # cancelled in the middle of a frame: the streams are of no use
            self.fail(Unreachable(self.peer_id, "a send was cancelled halfway"), frame)
            raise

    async def _send_parts(self, header: FrameHeader, frame: int, payload: memoryview) -> None:
        """Each stream takes the next part when it has written its last: the faster carry more.

        The next frame's turn comes when all parts of this one are taken, not when they are written.
        """
        parts = iter(range(-(-payload.nbytes // PART_BYTES)))

        async def pull(stripe: Stripe) -> None:
            async with stripe.turn:
                for part in parts:
                    piece = payload[part * PART_BYTES : (part + 1) * PART_BYTES]
                    start = encode_part(header, frame, part, payload, not stripe.wire.seals)
                    await stripe.send(frame, header.view, start, piece)

        pulls: list[asyncio.Task[None]] = []
        try:
            async with self._turn:
                pulls = [asyncio.create_task(pull(stripe)) for stripe in self.stripes]
                await asyncio.wait(pulls, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*pulls)
        finally:
            for task in pulls:
                task.cancel()
            await asyncio.gather(*pulls, return_exceptions=True)

    async def flush(self) -> None:
        await self.until(lambda: not any(stripe.waiting for stripe in self.stripes))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for `condition`. Raises `Refused` or `Unreachable` once the lane has failed."""
        while self.failure is None and not condition():
            self.changed.clear()
            await self.changed.wait()
        if self.failure is not None:
            raise self.failure

    def fail(self, failure: Failure, known_frame: int | None = None) -> None:
        """Fail the lane. The first failure counts, and everybody who waits hears of it. The sender
        of `known_frame` hears otherwise of that frame."""
        if self.failure is not None:
            return
        self.failure = failure
        waiting = [unit for stripe in self.stripes for unit in stripe.waiting]
        lost = {unit.frame: unit.view for unit in waiting if unit.frame != known_frame}
        self.lost_frames = len(lost)
        if self._growing is not None and self._growing is not asyncio.current_task():
            self._growing.cancel()
        for stripe in self.stripes:
            stripe.close()
        self.changed.set()
        if self.lost_frames and self.listeners.undelivered is not None:
            self.lost_frames = 0
            self.listeners.undelivered(self.peer_id, self.lane, failure, {*lost.values()})

    async def _hear_last_word(self) -> None:
        """Wait shortly: a reader may be about to hear why the stream ended."""
        readings = {stripe.reading for stripe in self.stripes}
        await asyncio.wait(readings, timeout=_LAST_WORD_S, return_when=asyncio.FIRST_COMPLETED)

    # ---- growth

    @contextlib.contextmanager
    def _busy(self, size_bytes: int) -> Iterator[None]:
        self._growth.began(now.monotonic_s())
        try:
            yield
        finally:
            self._growth.ended(now.monotonic_s(), size_bytes)
            self._judge()

    def _judge(self) -> None:
        growth, count = self._growth, len(self.stripes)
        if count > 1 and (rate := growth.sample(count * _BUFFERED_BYTES)) is not None:
            self.listeners.rate(self.peer_id, rate)
        if not growth.was_busy(_BUSY_S):
            return  # do not ask the kernel for the round trip
        round_trip_s = self.stripes[0].wire.round_trip_s()
        if round_trip_s is None:  # this one includes delays at busy ends
            round_trip_s = self.round_trip_s
        long = round_trip_s >= LONG_ROUND_TRIP_S
        enough_s = max(_BUSY_S, _BUSY_ROUND_TRIPS * round_trip_s)
        if not long or self._growing is not None or self.failure is not None:
            return
        if growth.should_grow(enough_s, count < self.most_stripes, self._is_held_back):
            self._growing = asyncio.create_task(self._grow(min(self.most_stripes, 2 * count)))

    def _is_held_back(self) -> bool | None:
        """Whether any stream was held back since this was last asked; None where not known."""
        held_back = [stripe.wire.is_held_back() for stripe in self.stripes]
        return None if None in held_back else any(held_back)

    async def _grow(self, count: int) -> None:
        try:
            for number in range(len(self.stripes), count):
                self.stripes.append(Stripe(self, await self._open_stripe(number)))
        except (Refused, Unreachable):
            self._growth.settled = True  # the streams that are there go on
        finally:
            self._growing = None
            self._growth.restart()


class Growth:
    """How fast a lane is while it has something to send, and whether more streams help."""

    def __init__(self) -> None:
        self.settled = False
        self._senders = 0
        self._since_s = 0.0
        self._busy_s = 0.0
        self._busy_bytes = 0
        self._sampled = (0.0, 0)
        self._rate_before = 0.0
        self._without_help = 0
        self._grew = False
        """Whether the last decision was to grow."""
        self._held_back = 0
        """Decisions in a row at which the lane was held back."""

    def began(self, now_s: float) -> None:
        if not self._senders:
            self._since_s = now_s
        self._senders += 1

    def ended(self, now_s: float, size_bytes: int) -> None:
        self._senders -= 1
        if now_s - self._since_s >= _BLOCKED_S:  # otherwise libp2p's buffers took it all at once
            self._busy_s += now_s - self._since_s
            self._busy_bytes += size_bytes
        self._since_s = now_s

    def sample(self, buffered_bytes: int) -> float | None:
        """Bytes per second since the last sample, if that is long enough."""
        busy_s = self._busy_s - self._sampled[0]
        size_bytes = self._busy_bytes - self._sampled[1]
        if busy_s < _ESTIMATE_S or size_bytes < 4 * buffered_bytes:
            return None
        self._sampled = (self._busy_s, self._busy_bytes)
        return size_bytes / busy_s

    def was_busy(self, enough_s: float) -> bool:
        """Whether the lane was busy for long enough to decide."""
        return not self.settled and self._busy_s >= enough_s

    def should_grow(
        self,
        enough_s: float,
        may_grow: bool,
        is_held_back: Callable[[], bool | None] = lambda: None,
    ) -> bool:
        """Decide once for each `enough_s` of being busy. `is_held_back` says whether anything but
        the way holds the present streams back; None where unknown. Where it is known, a lane that
        still gets faster by itself does not grow. Nor does one that was not held back three times
        in a row, since finding out what the way carries costs losses, once."""
        if not self.was_busy(enough_s):
            return False
        rate, held_back = self._busy_bytes / self._busy_s, is_held_back()
        helped = rate >= HELPED * self._rate_before
        gains_by_itself = helped and not self._grew
        self._rate_before = max(rate, self._rate_before)
        self.restart()
        self._grew = False
        if held_back is not None:
            self._held_back = self._held_back + 1 if held_back and not gains_by_itself else 0
            if self._held_back < HELD_BACK_TIMES:
                return False
        self._without_help = 0 if helped else self._without_help + 1
        self.settled = self._without_help >= PATIENCE or not may_grow
        self._grew = not self.settled
        return self._grew

    def restart(self) -> None:
        self._busy_s, self._busy_bytes, self._sampled = 0.0, 0, (0.0, 0)


@dataclass(slots=True)
class _Unit:
    """A frame or a part of one that is not yet acknowledged."""

    frame: int
    view: ViewId
    size_bytes: int
    first_write_s: float
    written_s: float = 0.0


class Stripe:
    """One stream of a lane; each frame, or part of one, that it carried is acknowledged."""

    def __init__(self, lane: Lane, wire: Wire) -> None:
        self.wire = wire
        self.waiting: collections.deque[_Unit] = collections.deque()
        self.load_bytes = 0
        """Bytes that wait to be written or acknowledged."""
        self.round_trip_s = 0.0
        self._lane = lane
        self.turn = asyncio.Lock()
        """Held by the one large frame that takes its parts to this stream."""
        self._write_lock = asyncio.Lock()
        self._is_halfway = False
        """A write is under way, or ended before all of it was written. Nothing may follow then."""
        self._acknowledged = 0
        self._last_acknowledgement_s = 0.0
        self.reading = asyncio.create_task(self._read_acknowledgements(), name=f"acks {lane.lane}")

    async def send(self, frame: int, view: ViewId, start: bytes, payload: memoryview) -> None:
        """Write when the lane's window has room."""
        lane, size_bytes = self._lane, len(start) + payload.nbytes
        self.load_bytes += size_bytes
        try:
            async with self._write_lock:
                await lane.until(
                    lambda: (
                        not lane.unacknowledged_bytes
                        or lane.unacknowledged_bytes + size_bytes <= lane.limits.window_bytes
                    )
                )
                if self._is_halfway:  # the lane fails once it has waited for the reason
                    raise ConnectionResetError("a write before it broke off")
                unit = _Unit(frame, view, size_bytes, now.monotonic_s())
                self.waiting.append(unit)
                lane.unacknowledged_bytes += size_bytes
                size_bytes = 0  # the acknowledgement takes it off the load
                self._is_halfway = True
                await self.wire.write_frame(start, payload, lane.turn, lane.limits.stall_s)
                self._is_halfway = False
                unit.written_s = now.monotonic_s()
        finally:
            self.load_bytes -= size_bytes

    def close(self) -> None:
        self.wire.close()
        if asyncio.current_task() is not self.reading:
            self.reading.cancel()

    async def _read_acknowledgements(self) -> None:
        lane = self._lane
        try:
            while True:
                (count,) = COUNT.unpack(await self.wire.read(COUNT.size))
                if count == HANG_UP:
                    lane.fail(await read_reason(self.wire, lane.peer_id))
                    return
                self._acknowledge(count)
        except PeerFault as fault:
            lane.fail(Refused(fault.cause, lane.peer_id))
            lane.listeners.fault(lane.peer_id, fault)
        except (TimeoutError, *CONNECTION_ERRORS):
            if lane.failure is None and not lane.gives_way:
                lane.broke()

    def _acknowledge(self, count: int) -> None:
        if not self._acknowledged < count <= self._acknowledged + len(self.waiting):
            raise PeerFault(f"acknowledged {count} frames", self._lane.peer_id)
        now_s = now.monotonic_s()
        while self._acknowledged < count:
            unit = self.waiting.popleft()
            self._acknowledged += 1
            self.load_bytes -= unit.size_bytes
            self._lane.unacknowledged_bytes -= unit.size_bytes
            self._measure(now_s, unit)
        self._last_acknowledgement_s = now_s
        self._lane.changed.set()

    def _measure(self, now_s: float, unit: _Unit) -> None:
        if unit.written_s:
            waited_s = now_s - unit.written_s
            self.round_trip_s = min(self.round_trip_s or waited_s, waited_s)
        if len(self._lane.stripes) > 1 or unit.size_bytes < _ESTIMATE_BYTES:
            return
        queued = self._last_acknowledgement_s > unit.first_write_s
        # A frame that queued behind others began to travel when the last of them arrived. Any other
        # frame has the whole round trip in its time.
        began_s = unit.first_write_s + self.round_trip_s
        if queued:
            began_s = self._last_acknowledgement_s
        elapsed_s = now_s - began_s
        if elapsed_s > max(0.0, 0.1 * self.round_trip_s):
            self._lane.listeners.rate(self._lane.peer_id, unit.size_bytes / elapsed_s)
