"""A bound on how much may be under way at once."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class ByteSemaphore:
    """Holds at most `count` items, and at most `size_bytes` together. One item alone may be
    larger."""

    def __init__(self, count: int, size_bytes: int) -> None:
        self._count = count
        self._size_bytes = size_bytes
        self._held: list[int] = []
        self._left = asyncio.Event()

    def _has_room_for(self, size_bytes: int) -> bool:
        together = sum(self._held) + size_bytes
        return not self._held or (len(self._held) < self._count and together <= self._size_bytes)

    @contextlib.asynccontextmanager
    async def taken(self, size_bytes: int) -> AsyncIterator[None]:
        """Wait until there is room, and hold it during the block."""
        while not self._has_room_for(size_bytes):
            self._left.clear()
            await self._left.wait()
        self._held.append(size_bytes)
        try:
            yield
        finally:
            self._held.remove(size_bytes)
            self._left.set()
