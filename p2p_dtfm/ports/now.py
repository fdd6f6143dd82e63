"""The time as a daemon sees it: this machine's, or that of the world that it runs in.

The clock is part of the context (`contextvars`), which every task inherits from the task that began
it. So two daemons in one process may have different clocks, and no clock is passed through thirty
constructors. A thread that belongs to no task sees this machine's clock.
"""

import time
from contextvars import ContextVar
from datetime import datetime
from typing import Protocol

_COUNTS_SLEEP: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """What the program asks of time."""

    def monotonic_ns(self) -> int:
        """A time that never goes back, and stands for no date."""

    def wall_ns(self) -> int:
        """The time since the epoch; somebody may set this clock."""

    def awake_or_asleep_ns(self) -> int:
        """Like `monotonic_ns`, but goes on while the machine sleeps."""

    def block_ns(self, duration_ns: int) -> None:
        """Let this thread wait: for jobs of an executor, never in an event loop."""


class MachineClock:
    """This machine's clock."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    def awake_or_asleep_ns(self) -> int:
        """Where the system has no such clock, sleep goes unseen: by the wall clock it could not be
        told from a clock that was set."""
        if _COUNTS_SLEEP is None:
            return time.monotonic_ns()
        return time.clock_gettime_ns(_COUNTS_SLEEP)

    def block_ns(self, duration_ns: int) -> None:
        time.sleep(duration_ns / 1e9)


_CLOCK: ContextVar[Clock] = ContextVar("clock", default=MachineClock())  # noqa: B039


def live_by(clock: Clock) -> None:
    """Use this clock from here on in this task, and in all tasks that it begins."""
    _CLOCK.set(clock)


def monotonic_ns() -> int:
    """Nanoseconds, to be compared with each other only."""
    return _CLOCK.get().monotonic_ns()


def monotonic_s() -> float:
    """The same in seconds; it is also the event loop's time."""
    return _CLOCK.get().monotonic_ns() / 1e9


def wall_ns() -> int:
    """Nanoseconds since the epoch."""
    return _CLOCK.get().wall_ns()


def wall_s() -> float:
    """Seconds since the epoch."""
    return _CLOCK.get().wall_ns() / 1e9


def awake_or_asleep_s() -> float:
    """Seconds, including the machine's sleep, to be compared with each other only."""
    return _CLOCK.get().awake_or_asleep_ns() / 1e9


def block_ns(duration_ns: int) -> None:
    """Let this thread wait: for jobs of an executor."""
    _CLOCK.get().block_ns(duration_ns)


def at_home(wall_s: float) -> datetime:
    """The moment `wall_s` in the time zone where this machine is now. The machine may have moved
    since the process began, and the C library by itself looks up the zone only once."""
    if hasattr(time, "tzset"):
        time.tzset()
    return datetime.fromtimestamp(wall_s).astimezone()
