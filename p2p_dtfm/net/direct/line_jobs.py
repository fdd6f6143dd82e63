"""What a direct line is given to write, and to read."""

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Protocol

from p2p_dtfm.net.direct.sealed import PIECE_BYTES, Bytes


class RightOfWay(Protocol):
    """Says whether another lane goes first."""

    def must_wait(self) -> bool:
        """Whether another lane goes first. Asked from any thread."""

    async def wait(self) -> None:
        """Wait until no other lane goes first, but not for long."""


class LineWrite:
    __slots__ = ("future", "pieces", "turn")

    def __init__(self, data: Sequence[Bytes], turn: RightOfWay | None) -> None:
        views = [memoryview(part) for part in data]
        self.pieces = collections.deque(
            view[start : start + PIECE_BYTES]
            for view in views
            for start in range(0, len(view), PIECE_BYTES)
        )
        self.turn = turn
        self.future: asyncio.Future[None] | None = None
        """The future of the caller that waits for this write, if any does."""

    @property
    def size_bytes(self) -> int:
        """Bytes that are left to be written."""
        return sum(map(len, self.pieces))


class LineRead:
    __slots__ = ("filled", "future", "is_due", "rest_of", "target")

    def __init__(
        self,
        target: memoryview,
        is_due: bool,
        rest_of: Callable[[bytes], int] | None,
    ) -> None:
        self.target = target
        self.filled = 0
        self.is_due = is_due
        """Whether the sender has promised the bytes. Otherwise it may take any time to begin."""
        self.rest_of = rest_of
        self.future: asyncio.Future[memoryview] | None = None

    @property
    def is_under_way(self) -> bool:
        """Whether the sender must not be silent for long."""
        return self.is_due or self.filled > 0

    def ask_for_the_rest(self) -> bool:
        """Whether there is more to read, now that the target is filled. Raises `PeerFault`."""
        if self.rest_of is None:
            return False
        rest_bytes, self.rest_of = self.rest_of(bytes(self.target)), None
        if rest_bytes:
            self.target = memoryview(bytearray(self.target) + bytes(rest_bytes))
        return rest_bytes > 0
