"""Shaped links: real daemons on one machine that live as if the world lay between them.

The sender lets bytes go no faster than the link to their receiver and its own uplink carry them;
the receiver holds what comes until the link's latency has passed since they left, and lets it in no
faster than its downlink. So nothing of a payload is copied to be delayed at the sender, and as many
bytes are under way as bandwidth and latency make, and no more. All peers of a shape are on one
machine, and their monotonic clocks are one: each piece of a stream says when it left, so that its
way through two p2pd is part of the latency, as far as that lasts. Streams and calls are
shaped; the making of connections and the directory are not, and neither loss nor slow start are
imitated. A host without a `Shaper` pays nothing.
"""

import asyncio
import collections
import logging
import struct
from dataclasses import dataclass
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError

CALL_OVERHEAD_BYTES = 200
"""What a call costs on the wire besides its body: envelopes, encryption, packet headers."""
QUEUE_BYTES = 1 << 20
"""What a router keeps of a stream whose receiver is slow, besides what is under way."""
SEND_BUFFER_BYTES = 1 << 18
"""What a sender may have written of a stream that has not left yet, as in a socket's buffer."""
FOLLOW_S = 0.1
PEERS_LIMIT = 1024
FILE_LIMIT_BYTES = 64 << 20
CORRUPTS_WITHIN_S = 3.0
"""Where nothing is sent for so long, nothing is damaged."""
_CHUNK_S = 0.004
_SMALLEST_CHUNK_BYTES = 1460
_LARGEST_CHUNK_BYTES = 1 << 18
_RAW_BUFFER_BYTES = 1 << 20
_LATE_LIMIT_S = 0.05
"""How far a busy process may lag behind the ideal clock of its links and still catch up."""
_STAMP = struct.Struct(">Id")
"""How many bytes follow, and when they left."""
_CALL_MARK = b"left"
"""Nothing that is called begins so."""
_CALL_STAMP = struct.Struct(">4sd")
_TIMER_S = 0.0005
"""asyncio wakes up to a millisecond late: so it is asked for half of one less."""

log = logging.getLogger(__name__)


class ShapedPeer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A peer of a scenario and the identity that plays it. A rate of 0 is no limit."""

    name: str
    peer_id: str
    uplink_bytes_per_s: int = 0
    downlink_bytes_per_s: int = 0


class ShapedLink(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way from one peer to another, by their ids. `latency_ns` is one way; a rate of 0 is no
    limit. What is sent while the way is `cut` waits; when `corrupted` grows, a byte of what is sent
    next over a stream arrives as another one: once for each number among all ways of an origin, and
    only if something is sent soon."""

    origin: str
    to: str
    latency_ns: int
    bytes_per_s: int
    cut: bool = False
    corrupted: int = 0


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What all peers of a shaped swarm are told: one file, the same for each of them."""

    scenario: str
    peers: tuple[ShapedPeer, ...]
    links: tuple[ShapedLink, ...]

    def save(self, path: Path) -> Path:
        """Daemons that follow the file see the old shape or the new one, never half of it."""
        temporary = path.with_suffix(".new")
        temporary.write_bytes(msgspec.json.encode(self))
        temporary.replace(path)
        return path

    @classmethod
    def load(cls, path: Path) -> "Shape":
        """Raises `UserError`."""
        fix = "give a file that `p2p-dtfm demo --scenario` wrote"
        try:
            if path.stat().st_size > FILE_LIMIT_BYTES:
                raise UserError(f"{path} is larger than {FILE_LIMIT_BYTES} bytes", fix)
            shape = msgspec.json.decode(path.read_bytes(), type=cls)
        except OSError as error:
            raise UserError(f"cannot read the shape file {path}: {error.strerror}", fix) from error
        except msgspec.MsgspecError as error:
            raise UserError(f"{path} is no shape file: {error}", fix) from error
        wrong = any(link.latency_ns < 0 or link.bytes_per_s < 0 for link in shape.links)
        if wrong or len(shape.peers) > PEERS_LIMIT:
            raise UserError(f"{path} is no shape file: a number in it is out of range", fix)
        return shape


class Shaper:
    """The links of one peer. Peers that the shape does not name are left untouched."""

    def __init__(self, shape: Shape, peer_id: str) -> None:
        me = next((peer for peer in shape.peers if peer.peer_id == peer_id), None)
        if me is None:
            raise UserError(
                f"the shape of {shape.scenario} has no peer with the identity {peer_id}",
                "start this daemon with the --home that was made for the scenario",
            )
        self._me = peer_id
        self.scenario = shape.scenario
        self.name = me.name
        self.names = {peer.peer_id: peer.name for peer in shape.peers}
        self.stamps = True
        """Whether both ends of a stream do as this one, so that its pieces say when they left."""
        self.uplink_bytes_per_s = me.uplink_bytes_per_s
        self.downlink_bytes_per_s = me.downlink_bytes_per_s
        self._uplink = _Channel(me.uplink_bytes_per_s)
        self._downlink = _Channel(me.downlink_bytes_per_s)
        own = [link for link in shape.links if link.origin == peer_id]
        self._damage = _Damage(max((link.corrupted for link in own), default=0))
        self._out = {link.to: _Link(link, self._uplink, self._damage) for link in own}
        self._in = {link.origin: link for link in shape.links if link.to == peer_id}

    def change(self, shape: Shape) -> None:
        """Links become slower or faster, are cut or healed; what is under way stays so."""
        for link in shape.links:
            if link.origin == self._me and link.to in self._out:
                self._out[link.to].change(link)
            elif link.to == self._me and link.origin in self._in:
                self._in[link.origin] = link

    async def follow(self, path: Path) -> None:
        """Take on each new version of the shape file, until cancelled. Raises `UserError`."""
        seen_ns = path.stat().st_mtime_ns
        while True:
            await asyncio.sleep(FOLLOW_S)
            if (changed_ns := path.stat().st_mtime_ns) != seen_ns:
                seen_ns = changed_ns
                self.change(Shape.load(path))

    def latency_s(self, origin: str) -> float:
        return self._in[origin].latency_ns / 1e9

    @property
    def label(self) -> str | None:
        """Goes with every figure that was measured over these links, where they are emulated."""
        return f"{self.name} of {self.scenario}"

    def shapes(self, peer_id: str) -> bool:
        """Whether the ways to and from a peer are shaped."""
        return self._link_to(peer_id) is not None and self._link_from(peer_id) is not None

    def _link_to(self, peer_id: str) -> "_Link | None":
        return self._out.get(peer_id)

    def _link_from(self, peer_id: str) -> ShapedLink | None:
        return self._in.get(peer_id)

    async def depart(self, peer_id: str, message: bytes) -> bytes:
        """Wait until a call's request or reply has been put on the way to a peer; returns it as it
        goes there."""
        link = self._link_to(peer_id)
        if link is None:
            return message
        size_bytes = len(message) + CALL_OVERHEAD_BYTES
        began_s = left_s = _now_s()
        while size_bytes > 0:
            part = min(size_bytes, link.chunk_bytes)
            left_s = await link.carry(part, max(began_s, _now_s() - _LATE_LIMIT_S))
            size_bytes -= part
        return _CALL_STAMP.pack(_CALL_MARK, left_s) + message if self.stamps else message

    async def arrive(self, peer_id: str, message: bytes) -> bytes:
        """Wait while what `depart` made at a peer comes here; returns the request or reply."""
        link = self._link_from(peer_id)
        if link is None:
            return message
        left_s = now_s = _now_s()
        if self.stamps and message.startswith(_CALL_MARK):  # a refusal at once has none
            _, left_s = _CALL_STAMP.unpack_from(message.ljust(_CALL_STAMP.size, b"\0"))
            message = message[_CALL_STAMP.size :]
        due_s = min(left_s, now_s) + link.latency_ns / 1e9
        await self._come(due_s, len(message) + CALL_OVERHEAD_BYTES)
        return message

    async def _come(self, due_s: float, size_bytes: int) -> None:
        await _until(due_s)
        if self._downlink.bytes_per_s:
            await _until(self._downlink.finish(due_s, size_bytes, cut_through=True))

    def wrap(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> "tuple[asyncio.StreamReader, asyncio.StreamWriter | ShapedWriter]":
        """A stream with a peer, shaped in both directions."""
        way_out, way_in = self._link_to(peer_id), self._link_from(peer_id)
        if way_out is None or way_in is None:
            return reader, writer
        under_way = way_in.bytes_per_s * way_in.latency_ns // 1_000_000_000
        arrivals = _Arrivals(self, peer_id, under_way + QUEUE_BYTES, reader)
        return arrivals.reader, ShapedWriter(way_out, writer, arrivals, self.stamps)


class LineLimit(Shaper):
    """A peer's own line, held to what its owner gives away, whomever it talks with.

    The planner is told these rates, and probes measure them. The directory's traffic, which is
    little, is not counted. A rate of 0 is no limit.
    """

    def __init__(self, uplink_bytes_per_s: int, downlink_bytes_per_s: int) -> None:
        me = ShapedPeer("me", "me", uplink_bytes_per_s, downlink_bytes_per_s)
        super().__init__(Shape("", (me,), ()), "me")
        self.stamps = False

    @property
    def label(self) -> None:
        """Nothing is emulated: these are the rates of a real line."""
        return None

    def latency_s(self, origin: str) -> float:
        return 0.0

    def _link_to(self, peer_id: str) -> "_Link":
        if (link := self._out.get(peer_id)) is None:
            if len(self._out) >= PEERS_LIMIT:
                self._out.clear()
            link = self._out[peer_id] = _Link(
                ShapedLink("me", peer_id, 0, 0), self._uplink, self._damage
            )
        return link

    def _link_from(self, peer_id: str) -> ShapedLink:
        return ShapedLink(peer_id, "me", 0, 0)


class _Channel:
    """Something that bytes pass one after another; `bytes_per_s` 0 holds nothing up."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def finish(self, ready_s: float, size_bytes: int, cut_through: bool = False) -> float:
        """When bytes that are there at `ready_s` have passed.

        With `cut_through` they were passing already while they came: they finish no earlier than
        they are there.
        """
        if not self.bytes_per_s:
            return ready_s
        passing_s = size_bytes / self.bytes_per_s
        start_s = ready_s - passing_s if cut_through else ready_s
        self.free_s = max(start_s, self.free_s) + passing_s
        return self.free_s


@dataclass
class _Damage:
    """What has been done to what a peer sends."""

    done: int
    """The highest number of `ShapedLink.corrupted` of which a byte was changed."""


class _Link:
    """The way to one peer. Who sends over it takes turns, chunk by chunk."""

    def __init__(self, link: ShapedLink, uplink: _Channel, damage: _Damage) -> None:
        self._channel = _Channel(link.bytes_per_s)
        self._uplink = uplink
        self._turn = asyncio.Lock()
        self._whole = asyncio.Event()
        self._damage = damage
        self._corrupted = link.corrupted
        self._corrupts_until_s = 0.0
        self.change(link)

    def change(self, link: ShapedLink) -> None:
        self._channel.bytes_per_s = link.bytes_per_s
        rates = [rate for rate in (link.bytes_per_s, self._uplink.bytes_per_s) if rate]
        wanted = int(min(rates) * _CHUNK_S) if rates else _LARGEST_CHUNK_BYTES
        self.chunk_bytes = min(max(wanted, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        if link.corrupted > self._corrupted:
            self._corrupts_until_s = _now_s() + CORRUPTS_WITHIN_S
        self._corrupted = link.corrupted
        if link.cut:
            self._whole.clear()
        else:
            self._whole.set()

    def as_it_arrives(self, part: memoryview) -> bytes | memoryview:
        """A part of a stream, with a byte of it changed if that is due."""
        if self._corrupted <= self._damage.done or _now_s() > self._corrupts_until_s:
            return part
        self._damage.done = self._corrupted
        changed = bytearray(part)
        changed[len(changed) // 2] ^= 0xFF
        return bytes(changed)

    async def carry(self, size_bytes: int, ready_s: float) -> float:
        """Wait until a chunk has left that was there at `ready_s`; returns when it left.

        Times are those of an ideal clock: what is late to wake up is not late for the link.
        The uplink is asked for one chunk of a link at a time, so that links share it evenly, and
        the link waits where the uplink is the slower of the two.
        """
        async with self._turn:
            if not self._whole.is_set():
                await self._whole.wait()
                ready_s = _now_s()
            start_s = max(ready_s, self._channel.free_s)
            left_s = self._channel.finish(start_s, size_bytes)
            left_s = max(left_s, self._uplink.finish(start_s, size_bytes))
            self._channel.free_s = left_s
            await _until(left_s)
            return left_s


class ShapedWriter:
    """What `asyncio.StreamWriter` is to our streams, with a socket's small buffer, so that the link
    does not idle while its sender prepares the next piece. What is written is copied."""

    def __init__(
        self, link: _Link, raw: asyncio.StreamWriter, arrivals: "_Arrivals", stamps: bool
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
        self._written.append((_now_s(), bytes(data)))
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
                    ready_s = max(written_s, _now_s() - _LATE_LIMIT_S)
                    left_s = await self._link.carry(len(part), ready_s)
                    stamp = _STAMP.pack(len(part), left_s) if self._stamps else b""
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


class _Arrivals:
    """Moves bytes from the stream as it is to one that a distant receiver would read."""

    def __init__(
        self, shaper: Shaper, origin: str, bound_bytes: int, raw: asyncio.StreamReader
    ) -> None:
        raw._limit = _RAW_BUFFER_BYTES  # type: ignore[attr-defined]
        self.reader = asyncio.StreamReader()
        self.held_bytes = 0
        self._shaper = shaper
        self._origin = origin
        self._bound_bytes = bound_bytes
        self._raw = raw
        self._stamps = _Stamps() if shaper.stamps else None
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
        rate = self._shaper._downlink.bytes_per_s
        wanted = int(rate * _CHUNK_S) or _LARGEST_CHUNK_BYTES
        most = min(max(wanted, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)
        data: bytes | Exception = b"?"
        while data and not isinstance(data, Exception):
            async with self._changed:
                await self._changed.wait_for(lambda: self.held_bytes < self._bound_bytes)
            try:
                data = await self._raw.read(most)
            except (OSError, EOFError, RuntimeError) as error:
                data = error
            latency_s = self._shaper.latency_s(self._origin)
            pieces: list[tuple[float, bytes | Exception]] = [(_now_s(), data)]
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
            await _until(due_s)
            if isinstance(data, Exception):
                self.reader.set_exception(data)
                return
            if not data:
                self.reader.feed_eof()
                return
            await self._shaper._come(due_s, len(data))
            await self._valve.open.wait()
            self.reader.feed_data(data)
            async with self._changed:
                self._coming.popleft()
                self.held_bytes -= len(data)
                self._changed.notify_all()


class _Stamps:
    """A stamped stream as it comes in."""

    def __init__(self) -> None:
        self._stamp = bytearray()
        self._left_s = 0.0
        self._left_bytes = 0

    def split(self, data: bytes) -> list[tuple[float, bytes | Exception]]:
        """The pieces, each with when it left; nothing leaves later than now."""
        found: list[tuple[float, bytes | Exception]] = []
        view, now_s = memoryview(data), _now_s()
        while view:
            if self._left_bytes:
                found.append((min(self._left_s, now_s), bytes(view[: self._left_bytes])))
                taken = min(self._left_bytes, len(view))
                self._left_bytes -= taken
            else:
                taken = min(_STAMP.size - len(self._stamp), len(view))
                self._stamp += view[:taken]
                if len(self._stamp) == _STAMP.size:
                    self._left_bytes, self._left_s = _STAMP.unpack(self._stamp)
                    self._stamp.clear()
            view = view[taken:]
        return found


class _Valve(asyncio.ReadTransport):
    """What a `StreamReader` closes while nobody reads what it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.open = asyncio.Event()
        self.open.set()

    def pause_reading(self) -> None:
        self.open.clear()

    def resume_reading(self) -> None:
        self.open.set()


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _until(at_s: float) -> None:
    left_s = at_s - _now_s() - _TIMER_S
    if left_s > 0:
        await asyncio.sleep(left_s)
