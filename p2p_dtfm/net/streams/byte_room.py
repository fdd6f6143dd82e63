"""Room for what senders have announced: one that exceeds its part waits."""

import asyncio
import contextlib
from collections.abc import Callable

from p2p_dtfm.core.gate.byte_budget import ByteBudget

LOOK_S = 1.0


class ByteRoom:
    """A `ByteBudget` that can be waited for."""

    def __init__(
        self, budget: ByteBudget, goes_first: Callable[[str], bool] = lambda sender: True
    ) -> None:
        """`goes_first`: the senders whose first frame finds room in any case."""
        self._budget = budget
        self._goes_first = goes_first
        self._freed = asyncio.Event()

    @property
    def total_bytes(self) -> int:
        """Bytes in flight now."""
        return self._budget.total

    def try_to_take(self, sender: str, size_bytes: int) -> bool:
        """Take room if there is any, and say whether there was."""
        return self._budget.take(sender, size_bytes, self._goes_first(sender))

    async def freed(self) -> None:
        """Wait until anything is given back, or for a moment, because the waiter's lane may have
        been closed."""
        self._freed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await self._freed.wait()

    async def take(self, sender: str, size_bytes: int, deadline_s: float) -> None:
        """Wait for room, and take it. Raises `TimeoutError`."""
        if self.try_to_take(sender, size_bytes):
            return
        async with asyncio.timeout(deadline_s):
            while not self.try_to_take(sender, size_bytes):
                await self.freed()

    def give_back(self, sender: str, size_bytes: int) -> None:
        """Give room back, once what came is consumed or dropped."""
        self._budget.give_back(sender, size_bytes)
        self._freed.set()
