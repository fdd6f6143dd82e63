"""The ideal clock of links: when bytes that are sent have passed."""

import asyncio
from dataclasses import dataclass

from p2p_dtfm.net.shaping.fine_timer import until
from p2p_dtfm.net.shaping.shape import ShapedLink
from p2p_dtfm.ports import now

CORRUPTS_WITHIN_S = 3.0
"""If nothing is sent for so long, nothing is damaged."""
LATE_LIMIT_S = 0.05
"""How far a busy process may lag behind the ideal clock of its links and still catch up."""
_CHUNK_S = 0.004
_SMALLEST_CHUNK_BYTES = 1460
_LARGEST_CHUNK_BYTES = 1 << 18


def chunk_bytes(bytes_per_s: int) -> int:
    """The bytes that pass at once, so that others get their turn. A rate of 0 is no limit."""
    wanted = int(bytes_per_s * _CHUNK_S) or _LARGEST_CHUNK_BYTES
    return min(max(wanted, _SMALLEST_CHUNK_BYTES), _LARGEST_CHUNK_BYTES)


class Channel:
    """A line that bytes pass one after another. `bytes_per_s` 0 holds nothing up."""

    def __init__(self, bytes_per_s: int) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0

    def finish(self, ready_s: float, size_bytes: int, cut_through: bool = False) -> float:
        """When bytes that are there at `ready_s` have passed.

        With `cut_through` they were already passing while they came, and finish no earlier than
        they are there.
        """
        if not self.bytes_per_s:
            return ready_s
        passing_s = size_bytes / self.bytes_per_s
        start_s = ready_s - passing_s if cut_through else ready_s
        self.free_s = max(start_s, self.free_s) + passing_s
        return self.free_s


@dataclass
class Damage:
    """The damage that has been done to what a peer sends."""

    done: int
    """The highest number of `ShapedLink.corrupted` of which a byte was changed."""


class ShapedPath:
    """The way to one peer. Its senders take turns, chunk by chunk."""

    def __init__(self, link: ShapedLink, uplink: Channel, damage: Damage) -> None:
        self._channel = Channel(link.bytes_per_s)
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
        self.chunk_bytes = chunk_bytes(min(rates, default=0))
        if link.corrupted > self._corrupted:
            self._corrupts_until_s = now.monotonic_s() + CORRUPTS_WITHIN_S
        self._corrupted = link.corrupted
        if link.cut:
            self._whole.clear()
        else:
            self._whole.set()

    def as_it_arrives(self, part: memoryview) -> bytes | memoryview:
        """A part of a stream, with a byte of it changed if that is due."""
        if self._corrupted <= self._damage.done or now.monotonic_s() > self._corrupts_until_s:
            return part
        self._damage.done = self._corrupted
        changed = bytearray(part)
        changed[len(changed) // 2] ^= 0xFF
        return bytes(changed)

    async def carry(self, size_bytes: int, ready_s: float) -> float:
        """Wait until a chunk that was there at `ready_s` has left; returns when it left.

        Times are those of an ideal clock: a sender that wakes up late is not late for the link. The
        uplink is asked for one chunk of a link at a time, so that links share it evenly. The link
        waits where the uplink is the slower of the two.
        """
        async with self._turn:
            if not self._whole.is_set():
                await self._whole.wait()
                ready_s = now.monotonic_s()
            start_s = max(ready_s, self._channel.free_s)
            left_s = self._channel.finish(start_s, size_bytes)
            left_s = max(left_s, self._uplink.finish(start_s, size_bytes))
            self._channel.free_s = left_s
            await until(left_s)
            return left_s
