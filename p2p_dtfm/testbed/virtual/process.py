"""One daemon's process, as far as the virtual world tells processes apart.

Everything that a daemon does is a turn of the event loop in a context that names its process: so a
killed process gets no turn any more, not even for what stands in its `finally`, and a paused one
gets those that it has missed when it goes on.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from p2p_dtfm.ports import chance, now

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
_EPOCH_NS = 1_800_000_000 * 1_000_000_000


class Turn:
    """A callback, and its handle, as asyncio keeps it."""

    def __init__(
        self, process: "Process", callback: Callable[..., Any], args: tuple[Any, ...]
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.handle: asyncio.Handle | None = None
        self.context: contextvars.Context | None = None

    def __call__(self) -> None:
        if self.handle is not None and self.handle.cancelled():
            return
        if self.process.take(self):
            self.callback(*self.args)


class Turns(Protocol):
    """What of the virtual loop a process needs."""

    now_ns: int
    job_ns: int
    in_job: bool

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]: ...

    def again(self, turn: "Turn") -> None:
        """Do a turn that was missed."""


class Process:
    """Has a clock of its own, which is the world's as long as nobody sets it."""

    def __init__(self, name: str, loop: Turns, draws: random.Random) -> None:
        self.name = name
        self.is_dead = False
        self.is_paused = False
        self.failures: list[str] = []
        """What its event loop was told and nobody caught."""
        self._loop = loop
        self._missed: list[Turn] = []
        self._context = contextvars.copy_context()
        self._context.run(self._settle, draws)

    def _settle(self, draws: random.Random) -> None:
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
