"""The links of one peer, and a peer's own line that is held to what its owner gives away."""

import asyncio
import struct
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.shaping.fine_timer import until
from p2p_dtfm.net.shaping.links import (
    LATE_LIMIT_S,
    Channel,
    Damage,
    ShapedPath,
    chunk_bytes,
)
from p2p_dtfm.net.shaping.shape import PEERS_LIMIT, Shape, ShapedLink, ShapedPeer
from p2p_dtfm.net.shaping.shaped_stream import Arrivals, ShapedWriter
from p2p_dtfm.ports import now

CALL_OVERHEAD_BYTES = 200
"""What a call costs on the wire besides its body: envelopes, encryption, packet headers."""
QUEUE_BYTES = 1 << 20
"""Bytes that a router keeps of a stream whose receiver is slow, besides those under way."""
FOLLOW_S = 0.1
_CALL_MARK = b"left"
"""No request and no reply begins so."""
_CALL_STAMP = struct.Struct(">4sd")


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
        """Whether both ends of a stream are shaped as this one, so that its pieces say when they
        left."""
        self.uplink_bytes_per_s = me.uplink_bytes_per_s
        self.downlink_bytes_per_s = me.downlink_bytes_per_s
        self._uplink = Channel(me.uplink_bytes_per_s)
        self._downlink = Channel(me.downlink_bytes_per_s)
        own = [link for link in shape.links if link.origin == peer_id]
        self._damage = Damage(max((link.corrupted for link in own), default=0))
        self._out = {link.to: ShapedPath(link, self._uplink, self._damage) for link in own}
        self._in = {link.origin: link for link in shape.links if link.to == peer_id}

    def change(self, shape: Shape) -> None:
        """Make links slower or faster, cut or heal them. What is under way is not affected."""
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
        """The label of every figure measured over these links, where they are emulated."""
        return f"{self.name} of {self.scenario}"

    def shapes(self, peer_id: str) -> bool:
        """Whether the ways to and from a peer are shaped."""
        return self._link_to(peer_id) is not None and self._link_from(peer_id) is not None

    def _link_to(self, peer_id: str) -> ShapedPath | None:
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
        began_s = left_s = now.monotonic_s()
        while size_bytes > 0:
            part = min(size_bytes, link.chunk_bytes)
            left_s = await link.carry(part, max(began_s, now.monotonic_s() - LATE_LIMIT_S))
            size_bytes -= part
        return _CALL_STAMP.pack(_CALL_MARK, left_s) + message if self.stamps else message

    async def arrive(self, peer_id: str, message: bytes) -> bytes:
        """Wait while what `depart` made at a peer comes here; returns the request or reply."""
        link = self._link_from(peer_id)
        if link is None:
            return message
        left_s = now_s = now.monotonic_s()
        if self.stamps and message.startswith(_CALL_MARK):  # an immediate refusal has no mark
            _, left_s = _CALL_STAMP.unpack_from(message.ljust(_CALL_STAMP.size, b"\0"))
            message = message[_CALL_STAMP.size :]
        due_s = min(left_s, now_s) + link.latency_ns / 1e9
        left_bytes = len(message) + CALL_OVERHEAD_BYTES
        rate, most = self._downlink.bytes_per_s, chunk_bytes(self._downlink.bytes_per_s)
        while left_bytes > 0:  # chunk by chunk, as streams: a large message takes its turns
            part = min(left_bytes, most)
            left_bytes -= part
            await self.come(due_s - (left_bytes / rate if rate else 0.0), part)
        return message

    async def come(self, due_s: float, size_bytes: int) -> None:
        """Wait until bytes that are due at `due_s` have passed this peer's own line."""
        await until(due_s)
        if self._downlink.bytes_per_s:
            await until(self._downlink.finish(due_s, size_bytes, cut_through=True))

    def wrap(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter | ShapedWriter]:
        """A stream with a peer, shaped in both directions."""
        way_out, way_in = self._link_to(peer_id), self._link_from(peer_id)
        if way_out is None or way_in is None:
            return reader, writer
        under_way = way_in.bytes_per_s * way_in.latency_ns // 1_000_000_000
        arrivals = Arrivals(self, peer_id, under_way + QUEUE_BYTES, reader)
        return arrivals.reader, ShapedWriter(way_out, writer, arrivals, self.stamps)


class LineLimit(Shaper):
    """A peer's own line, held to what its owner gives away, whichever peer it talks with.

    The planner is told these rates, and probes measure them. The directory's traffic, which is
    little, is not counted. A rate of 0 is no limit.
    """

    def __init__(self, uplink_bytes_per_s: int, downlink_bytes_per_s: int) -> None:
        me = ShapedPeer("me", "me", uplink_bytes_per_s, downlink_bytes_per_s)
        super().__init__(Shape("", (me,), ()), "me")
        self.stamps = False

    @property
    def label(self) -> None:
        """None: these are the rates of a real line."""
        return None

    def latency_s(self, origin: str) -> float:
        return 0.0

    def _link_to(self, peer_id: str) -> ShapedPath:
        if (link := self._out.get(peer_id)) is None:
            if len(self._out) >= PEERS_LIMIT:
                self._out.clear()
            link = self._out[peer_id] = ShapedPath(
                ShapedLink("me", peer_id, 0, 0), self._uplink, self._damage
            )
        return link

    def _link_from(self, peer_id: str) -> ShapedLink:
        return ShapedLink(peer_id, "me", 0, 0)
