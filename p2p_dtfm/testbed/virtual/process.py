"""One daemon's process, as far as the virtual world tells processes apart.

Everything that a daemon does is a turn of the event loop in a context that names its process: so a
killed process gets no turn any more, not even for what stands in its `finally`, and a paused one
gets those that it has missed when it goes on.
"""

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from p2p_dtfm.ports import chance, now

if TYPE_CHECKING:
    import random

    from p2p_dtfm.testbed.virtual.loop import Turn, VirtualLoop

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
_EPOCH_NS = 1_800_000_000 * 1_000_000_000


class Process:
    """Has a clock of its own, which is the world's as long as nobody sets it."""

    def __init__(self, name: str, loop: "VirtualLoop", draws: "random.Random") -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.failures: list[str] = []
        """What its event loop was told and nobody caught."""
        self._loop = loop
        self._missed: list[Turn] = []
        self._context = contextvars.copy_context()
        self._context.run(self._settle, draws)

    def _settle(self, draws: "random.Random") -> None:
        PROCESS.set(self)
        now.live_by(self)
        chance.live_by(draws)

    # its clock -----------------------------------------------------------------------------------

    def monotonic_ns(self) -> int:
        return self._loop.now_ns + self._loop.job_ns

    def wall_ns(self) -> int:
        return _EPOCH_NS + self.monotonic_ns()

    def block_ns(self, duration_ns: int) -> None:
        assert self._loop.in_job, "only a job of an executor may wait"
        self._loop.job_ns += duration_ns

    # what it does --------------------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A task of this process."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def call(self, function: Callable[..., Any], *args: Any) -> None:
        """A turn of this process."""
        self._loop.call_soon(function, *args, context=self._context.copy())

    def take(self, turn: "Turn") -> bool:
        """Whether the turn is to be done now."""
        if self.is_paused and not self.is_dead:
            self._missed.append(turn)
        return not (self.is_dead or self.is_paused)

    def kill(self) -> None:
        self.is_dead = True
        self._missed.clear()

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False
        missed, self._missed = self._missed, []
        for turn in missed:
            self._loop.again(turn)
