"""One daemon's process, as far as the virtual world tells processes apart.

Everything that a daemon does is a turn of the event loop in a context that names its process. A
killed process gets no more turns, not even for what stands in its `finally`. A paused process gets
the turns that it missed when it goes on. While a machine sleeps, its process's timers and monotonic
clock stand still: all that the process waits for comes later by the time slept.
"""

import asyncio
import contextvars
import random
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from p2p_dtfm.ports import chance, disk, now

PROCESS: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)
_EPOCH_NS = 1_800_000_000 * 1_000_000_000
_NEVER_NS = 1 << 62
ROUNDING_S = 1e-6
Result = TypeVar("Result")


class Turns(Protocol):
    """What a process needs of the virtual loop."""

    now_ns: int
    job_ns: int
    in_job: bool

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, context: contextvars.Context | None = None
    ) -> asyncio.Task[Any]: ...

    def again(self, turn: Any) -> None:
        """Do a turn that was missed."""

    def call_later(self, delay: float, callback: Callable[[], None]) -> object: ...

    def set_aside(self, process: Any) -> list[Any]:
        """Takes away the timers of `process` and the ends of its jobs. None of them comes by
        itself."""

    def put_back(self, later: list[Any], duration_ns: int) -> None:
        """Sets again what was set aside, all of it so much later."""


class Process:
    """One process, with a wall clock of its own. It shows the world's time until somebody sets
    it."""

    def __init__(
        self, name: str, loop: Turns, draws: random.Random, writes_to: disk.Disk | None = None
    ) -> None:
        """`writes_to` is its disk; None: this machine's own disk."""
        self.name = name
        self.wall_ahead_ns = 0
        """How far its wall clock is ahead of the world's."""
        self.is_dead = False
        self.is_paused = False
        self.is_busy = False
        """Its machine does other things too, so its jobs take longer."""
        self.asleep_since_ns: int | None = None
        """Since when its machine sleeps, by the world's time."""
        self._later: list[Any] = []
        """Its timers, set aside when it fell asleep."""
        self.behind_ns = 0
        """How long it has slept in all, up to when it last woke."""
        self.woke_ns = 0
        """When it last woke, by the world's time."""
        self.failures: list[str] = []
        """Errors that reached its event loop because nobody caught them."""
        self._loop = loop
        self._missed: list[Any] = []
        self._stalled_until_ns = 0
        self.no_turn_until_ns = 0
        """Until when it takes no turn, for whichever reason."""
        self._context = contextvars.copy_context()
        self._context.run(self._settle, draws, writes_to)

    def _settle(self, draws: random.Random, writes_to: disk.Disk | None) -> None:
        PROCESS.set(self)
        now.live_by(self)
        chance.live_by(draws)
        if writes_to is not None:
            disk.live_by(writes_to)

    @property
    def peer_name(self) -> str:
        """The name of the peer on whose machine it runs. Each life there is a process of its
        own."""
        return self.name.rpartition(".")[0]

    # its clock -----------------------------------------------------------------------------------

    def monotonic_ns(self) -> int:
        """As on Linux, it stands still while the machine sleeps."""
        return self.awake_or_asleep_ns() - self.behind_ns

    def wall_ns(self) -> int:
        return _EPOCH_NS + self.wall_ahead_ns + self.awake_or_asleep_ns()

    def awake_or_asleep_ns(self) -> int:
        return self._loop.now_ns + self._loop.job_ns

    def block_ns(self, duration_ns: int) -> None:
        assert self._loop.in_job, "only a job of an executor may wait"
        self._loop.job_ns += duration_ns

    @property
    def takes_turns(self) -> bool:
        """It is neither dead nor paused, its machine is awake, and no disk holds it up."""
        return self._loop.now_ns >= self.no_turn_until_ns

    # what it does --------------------------------------------------------------------------------

    def begin(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Begins a task of this process."""
        return self._loop.create_task(coroutine, context=self._context.copy())

    def here(self, ask: Callable[[], Result]) -> Result:
        """Calls `ask` at once in this process's context: by its clock, but in no turn of its
        loop."""
        return self._context.copy().run(ask)

    def miss(self, turn: Any) -> None:
        """Keeps a turn that was due while the process takes none."""
        if not self.is_dead:
            self._missed.append(turn)

    def kill(self) -> None:
        self.is_dead = True
        self.no_turn_until_ns = _NEVER_NS
        self._missed.clear()
        self._later.clear()

    def pause(self) -> None:
        self.is_paused = True
        self.no_turn_until_ns = _NEVER_NS

    def resume(self) -> None:
        self.is_paused = False
        self._take_turns_again()

    @property
    def is_asleep(self) -> bool:
        return self.asleep_since_ns is not None

    def fall_asleep(self) -> None:
        """Its machine falls asleep: its timers, its jobs and its disk wait as well."""
        self.asleep_since_ns = self._loop.now_ns
        self.no_turn_until_ns = _NEVER_NS
        self._later = self._loop.set_aside(self)

    def wake(self) -> None:
        assert self.asleep_since_ns is not None
        slept_ns = self._loop.now_ns - self.asleep_since_ns
        if self._stalled_until_ns > self.asleep_since_ns:
            self._stalled_until_ns += slept_ns
            self._go_on_after_the_disk()
        self.asleep_since_ns, self.woke_ns = None, self._loop.now_ns
        self.behind_ns += slept_ns
        self._loop.put_back(self._later, slept_ns)
        self._later = []
        self._take_turns_again()

    def _take_turns_again(self) -> None:
        """Takes turns again, unless something else holds it up."""
        if not (self.is_dead or self.is_paused or self.is_asleep):
            self.no_turn_until_ns = self._stalled_until_ns
            self._go_on()

    def stall(self, duration_ns: int) -> None:
        """Its event loop waits for the disk: the turn under way takes so much longer."""
        begins_ns = max(self._stalled_until_ns, self._loop.now_ns)
        self._stalled_until_ns = begins_ns + duration_ns
        self.no_turn_until_ns = max(self.no_turn_until_ns, self._stalled_until_ns)
        self._go_on_after_the_disk()

    def _go_on_after_the_disk(self) -> None:
        ends_s = (self._stalled_until_ns - self._loop.now_ns) / 1e9 + ROUNDING_S
        contextvars.Context().run(self._loop.call_later, ends_s, self._go_on)  # no turn of its own

    def _go_on(self) -> None:
        if self._loop.now_ns < self.no_turn_until_ns:
            return
        missed, self._missed = self._missed, []
        for turn in missed:
            self._loop.again(turn)
