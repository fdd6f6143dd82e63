"""What a virtual event loop turns: tasks, futures and callbacks that know their process.

Each has a number by which it is hashed, so that nothing depends on addresses: one seed gives one
trace in every process.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from p2p_dtfm.testbed.virtual.process import PROCESS, Process


class VirtualTask(asyncio.Task[Any]):
    """Hashed by its number: what walks through a set of tasks does so alike in each run."""

    seen_at: object = None
    """What it waited for when `seeds.watching.nudges` has seen that this is none of its waits."""

    def __init__(
        self,
        coro: Coroutine[Any, Any, Any],
        *,
        loop: Any,
        name: str | None = None,
        context: contextvars.Context | None = None,
    ) -> None:
        self.process: Process | None = PROCESS.get() if context is None else context.get(PROCESS)
        self._number: int = loop.next_number()  # asyncio, too, keeps all tasks in a set
        super().__init__(coro, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self._number

    __eq__ = object.__eq__

    @property
    def is_untaken(self) -> bool:
        """It has raised something that nobody has heard of."""
        return bool(self._log_traceback)

    def waits_at(self) -> str:
        """Its innermost functions, the last one first."""
        places = []
        awaited: Any = self.get_coro()
        while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
            module = Path(frame.f_code.co_filename).stem
            places.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
            awaited = awaited.cr_await
        return " < ".join(reversed(places))


class VirtualFuture(asyncio.Future[Any]):
    """Hashed by its number, too. `process`: whose it is."""

    _number = 0
    process: Process | None = None

    def __hash__(self) -> int:
        if not self._number:  # it is asked for the first time: few futures ever are
            loop: Any = self.get_loop()
            self._number = loop.next_number()
        return self._number

    __eq__ = object.__eq__


class LoopTurn(asyncio.TimerHandle):
    """A callback in the process that has begun it, as asyncio keeps it: it may be cancelled."""

    __slots__ = ("process",)

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        # in place of its parents': there are a hundred thousand turns in a seed
        self._when = when_s
        self._callback: Callable[..., Any] | None = callback
        self._args = args
        self._context = context
        self._cancelled = False
        self.process: Process | None = context.get(PROCESS)

    def cancel(self) -> None:
        self._cancelled = True
        self._callback, self._args = None, ()


Later = tuple[float, int, LoopTurn]
"""When, in which order among those of the same moment, and what."""
