"""The time as a daemon sees it: this machine's, or that of the world that it runs in.

Which clock holds is part of the context (`contextvars`), which every task inherits from whoever
has begun it: so two daemons in one process may have clocks that differ, and nobody hands a clock
through thirty constructors. A thread that belongs to no task sees this machine's.
"""

import time
from contextvars import ContextVar
from datetime import datetime
from typing import Protocol

_COUNTS_SLEEP: int | None = getattr(time, "CLOCK_BOOTTIME", None)


class Clock(Protocol):
    """What is asked of time."""

    def monotonic_ns(self) -> int:
        """Never goes back, and stands for no date."""

    def wall_ns(self) -> int:
        """Since the epoch; somebody may set it."""

    def awake_or_asleep_ns(self) -> int:
        """Like `monotonic_ns`, but goes on while the machine sleeps."""

    def block_ns(self, duration_ns: int) -> None:
        """Let this thread wait: for jobs of an executor, never in an event loop."""


class MachineClock:
    """This machine's."""

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        return time.time_ns()

    def awake_or_asleep_ns(self) -> int:
        """Where there is no such clock, sleep goes unseen: the one on the wall does not tell it
        from being set."""
        if _COUNTS_SLEEP is None:
            return time.monotonic_ns()
        return time.clock_gettime_ns(_COUNTS_SLEEP)

    def block_ns(self, duration_ns: int) -> None:
        time.sleep(duration_ns / 1e9)


_CLOCK: ContextVar[Clock] = ContextVar("clock", default=MachineClock())  # noqa: B039


def live_by(clock: Clock) -> None:
    """From here on in this task, and in all that it begins."""
    _CLOCK.set(clock)


def monotonic_ns() -> int:
    """Nanoseconds, to compare with each other."""
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
    """Seconds, to compare with each other, of which sleep is a part."""
    return _CLOCK.get().awake_or_asleep_ns() / 1e9


def block_ns(duration_ns: int) -> None:
    """Let this thread wait: for jobs of an executor."""
    _CLOCK.get().block_ns(duration_ns)


def at_home(wall_s: float) -> datetime:
    """That moment by the clocks where this machine is now: it may have been taken elsewhere since
    the process began, and the C library looks by itself only once where that is."""
    if hasattr(time, "tzset"):
        time.tzset()
    return datetime.fromtimestamp(wall_s).astimezone()
