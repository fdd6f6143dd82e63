"""The receiving side of all lanes: hellos, frames in their order, and counts of what was taken."""

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec

from p2p_dtfm.core.protocol.canonical import decode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.direct.line import DirectLine
from p2p_dtfm.net.door import Door
from p2p_dtfm.net.errors import Unreachable, one_line
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.libp2p.port import HostPort, Writer
from p2p_dtfm.net.streams.bulk_settings import IDLE_S, STRIPES_LIMIT, BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frame_memory import FrameMemory
from p2p_dtfm.net.streams.frames import WHOLE, FrameHeader
from p2p_dtfm.net.streams.reassembly import Reassembly
from p2p_dtfm.net.streams.stripes import COUNT, HANG_UP
from p2p_dtfm.net.streams.wire import LENGTH, LineWire, StreamWire, Wire, written

LANES = ("forward", "backward", "reduce", "state")
BULK_VERSION = 2
HELLO_DEADLINE_S = 10.0
STREAMS_LIMIT = 1024
_HELLO_LIMIT_BYTES = 1024
LATE_HELLO_NS = 60_000_000_000
"""Sessions are named by their sender's clock. A hello that the sender gave up may be read so much
later. If a hello is older than the present lane by more, its sender's clock was set back."""
_LINGER_S = 2.0
AT_ONCE_FRAMES = 32
"""Frames of all streams together that are taken in one turn of the event loop."""
LOOKS = 4
"""How often a frame that is half here is looked at within `stall_s`."""

log = logging.getLogger(__name__)


class LaneHello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The first message of a bulk stream."""

    version: int
    run_digest: str
    lane: str
    session: int
    """Names this opening of the lane: a lane's later stripes say to which opening they belong."""
    stripe: int


class Superseded(EOFError):
    """A stream came too late to matter."""


class IncomingLane:
    """The streams of one lane of one sender. The first that fails ends them all."""

    def __init__(self, name: str, session: int, reassembly: Reassembly) -> None:
        self.name = name
        self.session = session
        self.wires: dict[Wire, None] = {}
        """The streams, in the order in which they came."""
        self.reassembly = reassembly
        self.turn = asyncio.Lock()
        self.watching: asyncio.Task[None] | None = None
        """The task that watches frames that are half here."""
        self._failed = False

    def fail(self) -> bool:
        """Note a failure, and say whether it is the first: the others follow from it."""
        first, self._failed = not self._failed, True
        return first

    @property
    def idle_s(self) -> float:
        """For how long nothing has come; 0 while something that was not taken yet is here."""
        return 0.0 if self.reassembly.is_half_here else self.reassembly.listening.silent_s

    def close(self) -> None:
        self.reassembly.close()
        for wire in self.wires:
            wire.close()


class LoopTurns:
    """Counts the frames that are taken in one turn of the event loop. What lies in a stream's
    buffer is read without any wait, and thousands of tiny frames fit into one."""

    def __init__(self) -> None:
        self._taken = 0

    async def took_one(self) -> None:
        """Count a frame. Lets others have their turn once many were taken."""
        if not self._taken:
            asyncio.get_running_loop().call_soon(self._begin_anew)
        self._taken += 1
        if self._taken >= AT_ONCE_FRAMES:
            await asyncio.sleep(0)

    def _begin_anew(self) -> None:
        self._taken = 0


class IncomingLanes:
    """All lanes to this peer, by sender and name."""

    def __init__(
        self,
        host: HostPort,
        run_digest: str,
        listeners: BulkListeners,
        limits: BulkLimits,
        room: ByteRoom,
    ) -> None:
        """`room` is for what all senders together have announced."""
        self.listeners = listeners
        self.lanes: dict[tuple[str, str], IncomingLane] = {}
        self._host = host
        self._run_digest = run_digest
        self._limits = limits
        self._room = room
        self._memory = FrameMemory()
        self._turns = LoopTurns()
        self._arriving: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def disconnect(self, peer_id: str) -> None:
        """Close all lanes from a peer."""
        for (peer, _), lane in list(self.lanes.items()):
            if peer == peer_id:
                lane.close()

    def close(self) -> None:
        """Close all lanes. Streams that come afterwards are closed at once."""
        self._is_closed = True
        for lane in list(self.lanes.values()):
            lane.close()
        for task in self._arriving:
            task.cancel()

    async def accept_stream(
        self, sender: str, reader: asyncio.StreamReader, writer: Writer
    ) -> None:
        """Serve a stream through libp2p, which the host has let in. It ends with this plane,
        whatever its frame still waits for."""
        task = asyncio.current_task()
        assert task is not None
        self._arriving.add(task)
        try:
            await self._accept(sender, StreamWire(reader, writer), None)
        except asyncio.CancelledError:
            if not self._is_closed:  # otherwise `close` cancelled it
                raise
        finally:
            self._arriving.discard(task)

    def accept_line(self, sender: str, line: DirectLine) -> None:
        """Serve a direct line of a peer that TLS has let in."""
        work = self._accept(sender, LineWire(line, self._memory), self._host.door)
        self._spawn(work, "direct line, incoming")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)
        return task

    async def _accept(self, sender: str, wire: Wire, door: Door | None) -> None:
        """Greet a stream, and receive its frames. `door`, if given, is asked once the lane is
        known."""
        lane: IncomingLane | None = None
        with contextlib.ExitStack() as leaving:
            try:
                lane = await self._greet(sender, wire, door, leaving)
                if not self._is_closed:
                    await self._receive(sender, lane, wire)
            except PeerFault as fault:
                if lane is None or lane.fail():
                    self.listeners.fault(sender, PeerFault(fault.cause, sender))
                await _hang_up(wire, fault.cause)
            except (TimeoutError, *CONNECTION_ERRORS) as error:
                is_idle = lane is not None and lane.idle_s >= IDLE_S  # only few idle lanes are kept
                if lane is not None and lane.fail() and not is_idle:
                    cause = one_line(str(error) or repr(error))
                    self.listeners.lost(sender, lane.name, Unreachable(sender, cause))
            except Exception:
                log.exception("bug while taking a frame from %s", sender)
                await _hang_up(wire, "internal error")
            finally:
                if lane is not None:
                    self._over(sender, lane, wire)
                wire.close()

    async def _greet(
        self, sender: str, wire: Wire, door: Door | None, leaving: contextlib.ExitStack
    ) -> IncomingLane:
        async with asyncio.timeout(HELLO_DEADLINE_S):
            (length,) = LENGTH.unpack(await wire.read(LENGTH.size))
            if length > _HELLO_LIMIT_BYTES:
                raise PeerFault(f"a hello of {length} bytes")
            hello = decode(await wire.read(length), LaneHello, _HELLO_LIMIT_BYTES)
        self._check(hello)
        if door is not None:
            leave = door.enter(sender, f"lane {hello.lane}", 0)
            if isinstance(leave, str):
                raise EOFError(f"not let in: {leave}")
            leaving.callback(leave)
        lane = self._lane_of(sender, hello)
        lane.wires[wire] = None
        try:
            await self._tell(wire, 0)
        except BaseException:  # the stream has gone; later stripes may have come beside it
            self._over(sender, lane, wire)
            raise
        return lane

    def _over(self, sender: str, lane: IncomingLane, wire: Wire) -> None:
        """End a lane when one of its streams has ended: they live and end together."""
        lane.wires.pop(wire, None)
        lane.close()
        if self.lanes.get((sender, lane.name)) is lane:
            del self.lanes[sender, lane.name]

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

    def _lane_of(self, sender: str, hello: LaneHello) -> IncomingLane:
        """The lane that a stream belongs to; its first stripe begins a new one."""
        key = (sender, hello.lane)
        previous = self.lanes.get(key)
        if hello.stripe:
            if previous is None or previous.session != hello.session:
                raise Superseded("a stripe of a lane that is no more")
            if len(previous.wires) >= STRIPES_LIMIT:
                raise PeerFault(f"more than {STRIPES_LIMIT} stripes")
            return previous
        if previous is None and len(self.lanes) >= STREAMS_LIMIT and not self._make_room():
            raise PeerFault(f"already {STREAMS_LIMIT} bulk streams are open here")
        if previous is not None and 0 < previous.session - hello.session < LATE_HELLO_NS:
            raise Superseded("its sender has opened the lane anew since")
        if previous is not None:  # the sender started anew; this is of its past
            previous.fail()  # nobody has to hear of this loss
            previous.close()
        limit = max(self._limits.window_bytes, self._limits.frames.payload_bytes)
        lane = self.lanes[key] = IncomingLane(
            hello.lane, hello.session, Reassembly(limit, sender, self._room)
        )
        return lane

    def _make_room(self) -> bool:
        """End the lane that is idle for longest, if any is idle; those of members end last. The
        sender opens it again when it has something to send."""
        goes_first = self._host.door.goes_first
        idle = [
            (not goes_first(key[0]), lane.idle_s, key)
            for key, lane in self.lanes.items()
            if lane.idle_s >= IDLE_S
        ]
        if not idle:
            return False
        lane = self.lanes.pop(max(idle)[2])
        lane.fail()  # nobody has to hear of this loss
        lane.close()
        return True

    async def _receive(self, sender: str, lane: IncomingLane, wire: Wire) -> None:
        accepted = 0
        while True:
            await self._take_frame(sender, lane, wire)
            accepted += 1
            await self._tell(wire, accepted)
            await self._turns.took_one()

    async def _tell(self, wire: Wire, accepted: int) -> None:
        if (waiting := wire.write(COUNT.pack(accepted))) is not None:
            async with asyncio.timeout(self._limits.stall_s):
                await waiting

    async def _take_frame(self, sender: str, lane: IncomingLane, wire: Wire) -> None:
        taken_bytes, listening = 0, lane.reassembly.listening

        async def admit(header: FrameHeader) -> None:
            nonlocal taken_bytes
            with listening.kept_waiting():
                admitted = self.listeners.admit(sender, lane.name, header)
                if admitted is not None:
                    await admitted
                if header.part == WHOLE:  # else the whole frame counts while it is put together
                    await self._room.take(sender, header.payload_bytes, self._limits.stall_s)
                    taken_bytes = header.payload_bytes
            inside.enter_context(listening.inside())

        try:
            with contextlib.ExitStack() as inside:
                frame = await wire.read_frame(self._limits.frames, self._limits.stall_s, admit)
            if frame is None:
                raise EOFError("the sender closed the stream")
            header, payload = frame
            del frame
            if header.part == WHOLE:
                await self._deliver(sender, lane, header, payload)
                return
            with listening.kept_waiting():
                whole = await lane.reassembly.add(header, payload)
            del payload
            if whole is not None:
                try:
                    await self._deliver(sender, lane, *whole)
                finally:
                    lane.reassembly.release(whole[0])
            elif lane.watching is None or lane.watching.done():
                lane.watching = self._spawn(self._watch(sender, lane), "half a frame")
        finally:
            if taken_bytes:
                self._room.give_back(sender, taken_bytes)

    async def _watch(self, sender: str, lane: IncomingLane) -> None:
        """End the lane if a frame that is half here comes too late: between its parts nobody else
        looks."""
        while lane.reassembly.is_half_here:
            await asyncio.sleep(self._limits.stall_s / LOOKS)
            cause = lane.reassembly.why_late(self._limits.stall_s)
            if cause and lane.fail():
                lane.close()
                self.listeners.lost(sender, lane.name, Unreachable(sender, cause))

    async def _deliver(
        self, sender: str, lane: IncomingLane, header: FrameHeader, payload: bytearray
    ) -> None:
        with lane.reassembly.listening.kept_waiting():
            await self._hand_over(sender, lane, header, payload)

    async def _hand_over(
        self, sender: str, lane: IncomingLane, header: FrameHeader, payload: bytearray
    ) -> None:
        async with lane.turn:
            outcome = self.listeners.frame(sender, header, payload)
            if inspect.isawaitable(outcome):
                await outcome


async def _hang_up(wire: Wire, cause: str) -> None:
    """Say why, and wait shortly for the other side to close: closing first would lose the text."""
    text = one_line(cause).encode()[:_HELLO_LIMIT_BYTES]
    try:
        async with asyncio.timeout(_LINGER_S):
            await written(wire.write(COUNT.pack(HANG_UP) + LENGTH.pack(len(text)) + text))
            await wire.rest()
    except (TimeoutError, *CONNECTION_ERRORS):
        return
