"""Bulk tensors: persistent streams for each neighbour and lane, acknowledged frame by frame.

The opener sends a hello and then frames. The acceptor answers on the same stream with one verdict
on the hello. Then it sends cumulative counts of accepted frames, or parts of frames (u64). In place
of a count, 2^64-1 and a reason mean that it hangs up. A lane has one stream, and more (`stripes`)
where the round trip is long; large frames then travel in parts. Each direction of traffic has its
own streams, so two peers that send to each other at once cannot wait for each other. Activations go
before gradients of parameters, and those before state (`lane_priority`).

What carries a stream is a `wire`: libp2p, or a direct line where the peer can be called. A lane
begins with whichever is known to work, and moves to a direct line once there is one. It moves
between two frames, when all that were sent are acknowledged.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from typing import Any

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.streams.bulk_settings import IDLE_S, BulkLimits, BulkListeners, LaneListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frames import FrameHeader, Payload, as_bytes
from p2p_dtfm.net.streams.incoming import (
    BULK_VERSION,
    LANES,
    STREAMS_LIMIT,
    IncomingLanes,
    LaneHello,
)
from p2p_dtfm.net.streams.lane_priority import LanePriority
from p2p_dtfm.net.streams.stripes import (
    COUNT,
    Failure,
    Lane,
)
from p2p_dtfm.net.streams.wire import (
    LENGTH,
    LinesPort,
    LineWay,
    StreamWay,
    Way,
    Wire,
    read_reason,
    written,
)
from p2p_dtfm.ports import now, rarely

OPEN_DEADLINE_S = 10.0
PEERS_REMEMBERED = 1024
LANES_KEPT = 64
"""Beyond this number idle lanes end. Over direct lines each costs both ends a thread and three
descriptors, and in a large swarm any two peers are neighbours at some time."""
QUIET_S = 10.0
"""How long a lane that moves may take to come to rest."""
MOVE_PAUSE_S = 60.0
"""How long a lane that did not come to rest in that time stays where it is. Each try costs both
ends a line and a thread, and holds up the senders."""
_ESTIMATE_WEIGHT = 0.3
CLOSING = "this peer is closing"

log = logging.getLogger(__name__)


@dataclass
class _Opening:
    """The opening or moving of one lane, one at a time."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0
    """How many hold the lock, or wait for it."""
    failure: Failure | None = None
    """The newest failure. Whoever waited while it came about gets it too, and does not try
    again."""


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
        lines: LinesPort | None = None,
    ) -> None:
        """`lines`: direct lines, which belong to the plane from now on. Without them libp2p carries
        everything."""
        self._limits = limits = limits or BulkLimits()
        of_one = 2 * max(limits.window_bytes, limits.frames.payload_bytes)
        budget = ByteBudget(of_one, max(of_one, limits.in_flight_bytes))
        self.room = ByteRoom(budget, lambda sender: host.door.goes_first(sender))
        self._host = host
        self._run_digest = run_digest
        self._listeners = listeners
        self._outgoing: dict[tuple[str, str], Lane] = {}
        self._opening: dict[tuple[str, str], _Opening] = {}
        self._incoming = IncomingLanes(host, run_digest, listeners, limits, self.room)
        self._estimates: dict[str, float] = {}
        self._lane_priority = LanePriority()
        self._session = 0
        self._is_closed = False
        self._through_libp2p = StreamWay(host)
        self._lines = lines
        self._direct = LineWay(lines) if lines is not None else None
        self._moving: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def ready(self) -> "BulkPlane":
        """Start to accept streams."""
        for lane in LANES:
            await self._host.serve_streams(
                _protocol(lane), self._incoming.accept_stream, f"lane {lane}"
            )
        if self._lines is not None:
            await self._lines.ready(self._incoming.accept_line)
        return self

    async def send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        """Write a frame. Returns when it is written, which is before the peer accepts it.

        From then on the caller may change `payload`.

        Waits while `window_bytes` are unacknowledged. Raises `Refused` when the peer hung up with a
        reason, and `Unreachable` when the stream broke. Frames that were written and never
        acknowledged are then lost: `undelivered` hears of them at once, or else the next send does.
        """
        view = as_bytes(payload)
        held = await self._lane(peer_id, lane)
        shaper, began_s = self._host.shaper, now.monotonic_s()
        self._lane_priority.shares_uplink = bool(shaper and shaper.uplink_bytes_per_s)
        try:
            with self._lane_priority.taken(peer_id, lane):
                await held.send(header, view)
        except (Refused, Unreachable):
            self._forget(held)
            raise
        if rate := self._known_rate(peer_id):
            left_s = view.nbytes / rate - (now.monotonic_s() - began_s)
            self._lane_priority.leaves(peer_id, lane, left_s)

    def _known_rate(self, peer_id: str) -> float:
        """Known bytes per second at which frames leave for a peer; 0 where not known."""
        shaper = self._host.shaper
        rates = (shaper.uplink_bytes_per_s if shaper else 0, self._estimates.get(peer_id, 0.0))
        return min((rate for rate in rates if rate), default=0.0)

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
        """Bytes per second to a peer, as recent large frames travelled, or None."""
        estimate = self._estimates.get(peer_id)
        return None if estimate is None else int(estimate)

    def forget_rate(self, peer_id: str) -> None:
        """Forget how frames travelled to a peer: the way there is another one now."""
        self._estimates.pop(peer_id, None)

    def stripe_count(self, peer_id: str, lane: str) -> int:
        """Streams that carry a lane to a peer now."""
        held = self._outgoing.get((peer_id, lane))
        return 0 if held is None else len(held.stripes)

    def is_direct(self, peer_id: str, lane: str) -> bool:
        """Whether a direct line carries a lane to a peer now."""
        held = self._outgoing.get((peer_id, lane))
        return held is not None and held.way.is_direct

    def carriers(self) -> dict[str, dict[str, str]]:
        """What carries each lane to each peer that is sent to now: "line" or "libp2p"."""
        found: dict[str, dict[str, str]] = {}
        for (peer_id, lane), held in self._outgoing.items():
            found.setdefault(peer_id, {})[lane] = "line" if held.way.is_direct else "libp2p"
        return found

    def unacknowledged_bytes(self, peer_id: str, lane: str) -> int:
        """Bytes of a lane that have been written and not yet been accepted."""
        held = self._outgoing.get((peer_id, lane))
        return 0 if held is None else held.unacknowledged_bytes

    def disconnect(self, peer_id: str, cause: str = "disconnected by this peer") -> None:
        """Close all streams from and to a peer; what waits for it raises `Unreachable`."""
        for (peer, _), moving in list(self._moving.items()):
            if peer == peer_id:
                moving.cancel()
        for (peer, _), lane in list(self._outgoing.items()):
            if peer == peer_id:
                lane.fail(Unreachable(peer_id, cause))
                self._forget(lane)
        self._incoming.disconnect(peer_id)

    async def close(self) -> None:
        """Close everything, and open nothing any more."""
        self._is_closed = True
        for peer_id in dict.fromkeys(peer for peer, _ in (*self._outgoing, *self._moving)):
            self.disconnect(peer_id, CLOSING)
        self._incoming.close()
        if self._lines is not None:
            await self._lines.close()

    # ---- outgoing

    async def _lane(self, peer_id: str, lane: str) -> Lane:
        assert lane in LANES, lane
        key = (peer_id, lane)
        held = self._outgoing.get(key)
        if held is not None and held.failure is None and key not in self._opening:
            self._consider_to_move(held)
            return held
        async with self._opens(key) as opening:
            if self._is_closed:
                raise Unreachable(peer_id, CLOSING)
            held = self._outgoing.get(key)
            if held is not None and held.failure is not None:
                self._forget(held)
                if held.lost_frames:  # their sender must hear of it, once
                    raise held.failure
                held = None
            if held is None:
                self._make_room()
                if len(self._outgoing) >= STREAMS_LIMIT:
                    raise Unreachable(peer_id, f"already {STREAMS_LIMIT} bulk streams are open")
                try:
                    held = self._outgoing[key] = await self._first_lane(peer_id, lane)
                except (Refused, Unreachable) as failure:
                    opening.failure = failure
                    raise
                if self._is_closed:
                    self.disconnect(peer_id, CLOSING)
                    raise Unreachable(peer_id, CLOSING)
            self._consider_to_move(held)
            return held

    def _make_room(self) -> None:
        """Make room before a lane is opened. Broken lanes whose loss was told end, and of many
        lanes those that have been idle for longest."""
        for lane in list(self._outgoing.values()):
            if lane.failure is not None and not lane.lost_frames:
                self._forget(lane)
        idle_since_s, idle = now.monotonic_s() - IDLE_S, []
        for key, lane in self._outgoing.items():
            if key not in self._opening and lane.is_quiet and lane.used_s <= idle_since_s:
                idle.append(lane)
        idle.sort(key=lambda lane: lane.used_s)
        kept = 0 if rarely.happens("few lanes") else LANES_KEPT
        for lane in idle[: max(0, len(self._outgoing) + 1 - kept)]:
            del self._outgoing[lane.peer_id, lane.lane]
            lane.retire()

    @contextlib.asynccontextmanager
    async def _opens(self, key: tuple[str, str]) -> AsyncIterator[_Opening]:
        """Let one caller at a time open a lane, or move it. Raises a failure that came while the
        caller waited."""
        opening = self._opening.setdefault(key, _Opening())
        opening.users += 1
        known = opening.failure
        try:
            async with opening.lock:
                if opening.failure is not None and opening.failure is not known:
                    raise opening.failure
                yield opening
        finally:
            opening.users -= 1
            if not opening.users:
                del self._opening[key]

    async def _first_lane(self, peer_id: str, lane: str) -> Lane:
        if self._direct is not None and self._lines is not None and self._lines.works(peer_id):
            with contextlib.suppress(Unreachable):
                return await self._new_lane(peer_id, lane, self._direct).open()
        return await self._new_lane(peer_id, lane, self._through_libp2p).open()

    def _consider_to_move(self, held: Lane) -> None:
        key = (held.peer_id, held.lane)
        if self._lines is None or held.way.is_direct or key in self._moving:
            return
        if self._lines.wants(held.peer_id):
            moving = asyncio.create_task(self._move(held), name=f"moves {held.lane}")
            self._moving[key] = moving
            moving.add_done_callback(lambda done: self._moving.pop(key, None))

    async def _move(self, before: Lane) -> None:
        """Put a lane on a direct line, if there is one. The lane goes on while the line is made.
        Then nothing more is sent until all that was sent is acknowledged."""
        assert self._direct is not None
        peer_id, lane, key = before.peer_id, before.lane, (before.peer_id, before.lane)
        wire: Wire | None = None
        pause_s = 0.0
        try:
            wire = await self._direct.open(peer_id, _protocol(lane), OPEN_DEADLINE_S)
            async with self._opens(key):
                if self._outgoing.get(key) is not before:
                    return  # it has failed; the next one begins with a direct line
                async with asyncio.timeout(QUIET_S):
                    await before.quiet()
                before.gives_way = True
                try:
                    after = await self._new_lane(peer_id, lane, self._direct, wire).open()
                except BaseException:
                    before.stays()
                    raise
                self._outgoing[key], wire = after, None
                before.retire()
        except (TimeoutError, Unreachable, PeerFault) as error:
            log.debug("%s to %s stays with libp2p: %r", lane, peer_id, error)
            pause_s = MOVE_PAUSE_S if isinstance(error, TimeoutError) else 0.0
        finally:
            if wire is not None:
                wire.close()
        await asyncio.sleep(pause_s)  # until then no other move of this lane begins

    def _new_lane(self, peer_id: str, lane: str, way: Way, first: Wire | None = None) -> Lane:
        """Make a lane. `first`: a wire that is open already, for its first stripe."""
        self._session = max(self._session + 1, now.wall_ns())
        session, heard = self._session, self._listeners

        async def open_stripe(stripe: int) -> Wire:
            wire = first if stripe == 0 else None
            if wire is None:
                wire = await way.open(peer_id, _protocol(lane), OPEN_DEADLINE_S)
            hello = LaneHello(BULK_VERSION, self._run_digest, lane, session, stripe)
            try:
                return await _say_hello(peer_id, wire, hello)
            except (Refused, Unreachable):
                if way.is_direct and stripe == 0 and self._lines is not None:
                    self._lines.let_nobody_in(peer_id)
                raise

        return Lane(
            (peer_id, lane),
            way,
            self._limits,
            open_stripe,
            LaneListeners(heard.fault, heard.lost, self._measured, heard.undelivered),
            self._lane_priority.of(peer_id, lane),
        )

    def _forget(self, lane: Lane) -> None:
        key = (lane.peer_id, lane.lane)
        if self._outgoing.get(key) is lane:
            del self._outgoing[key]
            if lane.way.is_direct and self._lines is not None:
                self._lines.broke(lane.peer_id)

    def _measured(self, peer_id: str, bytes_per_s: float) -> None:
        held = self._estimates.get(peer_id, bytes_per_s)
        estimate = held + _ESTIMATE_WEIGHT * (bytes_per_s - held)
        put_newest(self._estimates, peer_id, estimate, PEERS_REMEMBERED)


async def to_its_end(send: Coroutine[Any, Any, None]) -> None:
    """Send a frame whose payload stays as it is, to its end, even if the caller is cancelled. A
    frame that is cut short costs the lane, and all that is under way on it."""
    sending = asyncio.create_task(send, name="sends to its end")
    sending.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen
    await asyncio.shield(sending)


def _protocol(lane: str) -> str:
    return f"/p2p-dtfm/1/bulk/{lane}"


async def _say_hello(peer_id: str, wire: Wire, hello: LaneHello) -> Wire:
    """Say hello on a wire, and return it once the other side has let it in. Raises `Refused` or
    `Unreachable`."""
    try:
        async with asyncio.timeout(OPEN_DEADLINE_S):
            greeting = encode(hello)
            await written(wire.write(LENGTH.pack(len(greeting)) + greeting))
            (verdict,) = COUNT.unpack(await wire.read(COUNT.size))
            if verdict:
                raise await read_reason(wire, peer_id)
    except (TimeoutError, *CONNECTION_ERRORS) as error:
        wire.close()
        raise Unreachable(peer_id, f"no answer to a hello on {hello.lane}") from error
    except BaseException:
        wire.close()
        raise
    return wire
