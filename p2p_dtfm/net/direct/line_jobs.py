"""What a direct line is given to write, and to read."""

import asyncio
import collections
from collections.abc import Callable, Sequence
from typing import Protocol

from p2p_dtfm.net.direct.sealed import PIECE_BYTES, Bytes


class RightOfWay(Protocol):
    """Whether somebody goes first."""

    def must_wait(self) -> bool:
        """Asked from any thread."""

    async def wait(self) -> None:
        """Until nobody goes first, but not for long."""


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
        """Of who waits for it, if anybody does."""

    @property
    def size_bytes(self) -> int:
        """Of what is left of it."""
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
        """Its sender has promised it; else it may take as long as it likes to begin."""
        self.rest_of = rest_of
        self.future: asyncio.Future[memoryview] | None = None

    @property
    def is_under_way(self) -> bool:
        """Its sender must not be silent for long."""
        return self.is_due or self.filled > 0

    def ask_for_the_rest(self) -> bool:
        """Whether there is more to be read, now that it is filled. Raises `PeerFault`."""
        if self.rest_of is None:
            return False
        rest_bytes, self.rest_of = self.rest_of(bytes(self.target)), None
        if rest_bytes:
            self.target = memoryview(bytearray(self.target) + bytes(rest_bytes))
        return rest_bytes > 0
