"""Frames out of parts that come over several streams, within a bound."""

import asyncio

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frames import PART_BYTES, WHOLE, FrameHeader, patience_s
from p2p_dtfm.net.streams.listening import Listening

OPEN_FRAMES_LIMIT = 64


class _Partial:
    def __init__(self, header: FrameHeader, began_s: float) -> None:
        self.header = _of_frame(header)
        self.began_s = began_s
        """How long the lane had listened when this frame began."""
        self.payload = bytearray(header.payload_bytes)
        self.missing = set(range(-(-header.payload_bytes // PART_BYTES)))


class Reassembly:
    """The unfinished frames of one lane of one sender.

    A sender puts the parts of one frame on its streams before those of the next. So a frame that
    has to wait for room here waits only for frames whose parts are all before its own.
    """

    def __init__(self, limit_bytes: int, sender: str = "", room: ByteRoom | None = None) -> None:
        """`room` is shared with all other lanes."""
        self._limit_bytes = limit_bytes
        self._sender = sender
        self._shared = room
        self._partial: dict[int, _Partial] = {}
        self._held_bytes = 0
        self._room = asyncio.Event()
        self._closed = False
        self.listening = Listening()

    @property
    def is_half_here(self) -> bool:
        """Whether more of any frame has to come."""
        return bool(self._partial)

    def why_late(self, stall_s: float) -> str:
        """Why frames that are half here are waited for no longer; empty while they are. The limits
        are those of a whole frame: nothing comes for `stall_s`, or it takes longer than
        `patience_s`."""
        if not self._partial:
            return ""
        if self.listening.silent_s > stall_s:
            return f"nothing came for {stall_s:g} s of a tensor that is half here"
        now_s = self.listening.so_far_s
        for partial in self._partial.values():
            if now_s - partial.began_s > patience_s(stall_s, partial.header.payload_bytes):
                return "a tensor comes too slowly"
        return ""

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    async def add(
        self, header: FrameHeader, part: bytearray
    ) -> tuple[FrameHeader, bytearray] | None:
        """The frame that this part completes, or None. Waits while there is no room for it.

        The caller calls `release` once it has taken a completed frame. Raises `PeerFault`, and
        `EOFError` when the lane is closed meanwhile.
        """
        while (partial := self._partial.get(header.frame)) is None:
            if self._closed:
                raise EOFError("the lane was closed")
            if not self._has_room(header.payload_bytes):
                self._room.clear()
                await self._room.wait()
            elif self._shared and not self._shared.try_to_take(self._sender, header.payload_bytes):
                await self._shared.freed()
            else:
                self._partial[header.frame] = _Partial(header, self.listening.so_far_s)
                self._held_bytes += header.payload_bytes
        if partial.header != _of_frame(header):
            raise PeerFault(f"parts of different tensors as frame {header.frame}")
        if header.part not in partial.missing:
            raise PeerFault(f"part {header.part} of frame {header.frame} twice")
        partial.missing.discard(header.part)
        start = header.part * PART_BYTES
        partial.payload[start : start + len(part)] = part
        if partial.missing:
            return None
        del self._partial[header.frame]
        return partial.header, partial.payload

    def release(self, header: FrameHeader) -> None:
        """Give back the room of a frame that `add` returned."""
        self._held_bytes -= header.payload_bytes
        if self._shared:
            self._shared.give_back(self._sender, header.payload_bytes)
        self._room.set()

    def close(self) -> None:
        """Let go of all parts, and wake all who wait for room."""
        self._closed = True
        for partial in self._partial.values():
            self.release(partial.header)
        self._partial.clear()
        self._room.set()

    def _has_room(self, size_bytes: int) -> bool:
        if not self._held_bytes:
            return True
        few = len(self._partial) < OPEN_FRAMES_LIMIT
        return few and self._held_bytes + size_bytes <= self._limit_bytes


def _of_frame(header: FrameHeader) -> FrameHeader:
    """The part of the header that is the same for all parts of a frame."""
    return msgspec.structs.replace(header, checksum=0, part=WHOLE)
