"""How fast the swarm's steps commit now, waiting included; the same figure on all its members.

All members see a step commit at about the same time, and take over a view between the same two
steps. So each measures alike from what it sees itself: over the last while of the present view. A
newcomer measures what those measure that were there before.
"""

from collections import deque
from collections.abc import Callable

from p2p_dtfm.ports import now

WINDOW_S = 30.0
WINDOW_STEPS = 20
"""The last while is whichever of the two is longer."""
MARKS_LIMIT = 4096
SETTLED_STEPS = 10
SETTLED_S = 10.0
LATE_STEPS = 2.0
"""A step that takes more than so many usual ones counts while it is still under way."""


class StepRate:
    """Call `begins` with a view, `committed` with each step."""

    def __init__(self, clock_s: Callable[[], float] = now.monotonic_s) -> None:
        self._clock_s = clock_s
        self._marks_s: deque[float] = deque(maxlen=MARKS_LIMIT)
        self._began_s: float | None = None

    def begins(self) -> None:
        """A view takes over now: what was measured in another one says nothing of this one."""
        self._marks_s.clear()
        self._began_s = self._clock_s()
        self._marks_s.append(self._began_s)

    def ends(self) -> None:
        """No view is in force here: a rate that is not seen any more is not known."""
        self._marks_s.clear()
        self._began_s = None

    def committed(self) -> None:
        """A step is committed now. A repeated one is work like any other."""
        now_s = self._clock_s()
        self._marks_s.append(now_s)
        marks_s = self._marks_s
        while len(marks_s) > WINDOW_STEPS + 1 and marks_s[1] < now_s - WINDOW_S:
            marks_s.popleft()

    def steps_per_s(self) -> float | None:
        """None before the first step of a view."""
        count = len(self._marks_s) - 1
        if count < 1:
            return None
        span_s = self._marks_s[-1] - self._marks_s[0]
        since_s = self._clock_s() - self._marks_s[-1]
        if since_s > LATE_STEPS * span_s / count:
            span_s += since_s
        return count / span_s if span_s > 0 else None

    @property
    def is_settled(self) -> bool:
        """Whether the figure is more than the first steps of a view."""
        steps = len(self._marks_s) - 1
        if self._began_s is None or steps < SETTLED_STEPS:
            return False
        return self._marks_s[-1] - self._began_s >= SETTLED_S
