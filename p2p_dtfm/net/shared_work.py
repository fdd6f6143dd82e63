"""Work that several parts of a daemon wait for, and that goes on even if one of them stops
waiting."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

Result = TypeVar("Result")


class SharedWork(Generic[Result]):
    """Runs each piece of work once, by its name, however many wait for it, and to its end if a
    waiter is cancelled. A new view needs most of what the last one did. Over a thin line, a file
    that began anew with each view would not come before the next one."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[Result]] = {}

    async def result(self, name: str, begin: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """The result of the work, which is begun unless it is under way. Raises what the work
        raises."""
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
