"""What a virtual event loop turns: tasks, futures and callbacks that know their process.

Each has a number by which it is hashed, so that nothing depends on addresses in memory. So one
seed gives the same trace in every process.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from p2p_dtfm.testbed.virtual.process import PROCESS, Process


class VirtualTask(asyncio.Task[Any]):
    """Hashed by its number: a walk through a set of tasks has the same order in each run."""

    seen_at: object = None
    """The future at which `seeds.watching.nudges` last saw it wait, where that is no wait of
    theirs."""

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
        """It has raised something that nobody has taken."""
        return bool(self._log_traceback)

    def waits_at(self) -> str:
        """Its innermost functions, the innermost first."""
        places = []
        awaited: Any = self.get_coro()
        while awaited is not None and (frame := getattr(awaited, "cr_frame", None)) is not None:
            module = Path(frame.f_code.co_filename).stem
            places.append(f"{module}.{frame.f_code.co_name}:{frame.f_lineno}")
            awaited = awaited.cr_await
        return " < ".join(reversed(places))


class VirtualFuture(asyncio.Future[Any]):
    """Hashed by its number, too. `process` is its owner."""

    _number = 0
    process: Process | None = None

    def __hash__(self) -> int:
        if not self._number:  # the first time its hash is asked for: few futures' ever is
            loop: Any = self.get_loop()
            self._number = loop.next_number()
        return self._number

    __eq__ = object.__eq__


class LoopTurn(asyncio.TimerHandle):
    """A callback of the process that began it. It may be cancelled, as asyncio's timer handles
    may."""

    __slots__ = ("process",)

    def __init__(
        self,
        when_s: float,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: contextvars.Context,
    ) -> None:
        # replaces the parents' `__init__`: a seed has a hundred thousand turns
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
"""When it is due, its place among those of the same moment, and the turn."""
