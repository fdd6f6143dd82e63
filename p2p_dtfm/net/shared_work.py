"""Work that several parts of a daemon wait for, and that goes on where one of them does not."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedWork(Generic[Result]):
    """Each is under way once, by its name, whoever waits for it, and goes on where a waiter is
    cancelled: a new view needs most of what the last one did, and over a thin line a file that
    begins anew with each view does not come before the next one."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[Result]] = {}

    async def result(self, name: str, begin: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Raises what the work does."""
        task = self._under_way.get(name)
        if task is None:
            task = self._under_way[name] = asyncio.create_task(begin())
            task.add_done_callback(lambda ended: self._ended(name, ended))
        return await asyncio.shield(task)

    def _ended(self, name: str, task: asyncio.Task[Result]) -> None:
        del self._under_way[name]
        if not task.cancelled():
            task.exception()  # seen, even if nobody waits for it any more

    async def close(self) -> None:
        for task in (tasks := list(self._under_way.values())):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
