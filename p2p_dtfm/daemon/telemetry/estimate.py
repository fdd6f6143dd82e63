"""How long something that has parts still takes, judged by how long its parts took so far."""

from collections.abc import Callable

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.ports import now

SHOWN_FROM_S = 2.0
"""A shorter time is no news to anybody."""


class Estimate:
    """Begins when it is first told how much is done; or when it is made, if so much (`first`) is
    given."""

    def __init__(
        self, clock_s: Callable[[], float] = now.monotonic_s, first: float | None = None
    ) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()
        self._first = first

    def left_s(self, done: float, total: float) -> float | None:
        """The seconds that are left; None while nothing was done since it began."""
        if self._first is None or done < self._first:  # what fails is in part done again
            self._first, self._began_s = done, self._clock_s()
        if done <= self._first:
            return None
        took_s = self._clock_s() - self._began_s
        return took_s * max(0.0, total - done) / (done - self._first)

    def words(self, done: float, total: float) -> str:
        """ ", about 12 s left", or nothing while nothing can be said."""
        left_s = self.left_s(done, total)
        if left_s is None or left_s < SHOWN_FROM_S:
            return ""
        return f", about {in_words(left_s)} left"


def in_words(seconds: float) -> str:
    """With two digits or so."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.0f} h" if hours < 48 else counted(hours / 24, "day")
