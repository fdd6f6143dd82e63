"""How long something that has parts takes yet, judged by how long its parts took so far."""

from collections.abc import Callable

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.ports import now

SHOWN_FROM_S = 2.0
"""A shorter time is no news to anybody."""


class Estimate:
    """Begins when it is made."""

    def __init__(self, clock_s: Callable[[], float] = now.monotonic_s) -> None:
        self._clock_s = clock_s
        self._began_s = clock_s()

    def left_s(self, done: float, total: float) -> float | None:
        """None while nothing is done."""
        if done <= 0:
            return None
        return (self._clock_s() - self._began_s) * max(0.0, total - done) / done

    def words(self, done: float, total: float) -> str:
        """ ", about 12 s left", or nothing while nothing can be said."""
        left_s = self.left_s(done, total)
        if left_s is None or left_s < SHOWN_FROM_S:
            return ""
        return f", about {in_words(left_s)} left"


def in_words(seconds: float) -> str:
    """Two digits or so."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 100:
        return f"{minutes:.0f} min"
    hours = minutes / 60
    return f"{hours:.0f} h" if hours < 48 else counted(hours / 24, "day")
