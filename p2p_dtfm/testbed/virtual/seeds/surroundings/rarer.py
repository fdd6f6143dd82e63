"""A world in which daemons go the rarer ways of `ports.rarely`, for as long as faults are done.

In each seed only some points are live, some of them often. If all were, each would hide what the
others show.
"""

import random
from collections import Counter
from collections.abc import Collection

from p2p_dtfm.ports.rarely import POINTS

LIVE = 0.5
"""The share of points that are live in a seed."""
OFTEN = (0.03, 0.1, 0.3)
"""How often a live point is taken."""
LINGERS_S = (0.01, 0.8)
OF_DISKS_THAT_LOSE = ("layer unreadable",)
"""A disk that does not give back what it has is no crash: what was told to be safe may be lost."""


class RarerWays:
    """The `ports.rarely.Rarer` of one seed, with chance of its own."""

    def __init__(self, seed: int, never: Collection[str] = ()) -> None:
        """`never` are points that are not taken."""
        # each point has a chance of its own: a new point in the table changes nothing for the
        # others
        self._draws = {it: random.Random(f"rarer {seed} {it}") for it in POINTS if it not in never}
        self._often = {
            point: draws.choice(OFTEN)
            for point, draws in self._draws.items()
            if draws.random() < LIVE
        }
        self.taken: Counter[str] = Counter()
        """How often each point was taken."""
        self.is_over = False
        """All is mended: from now on no rarer way is taken."""

    def happens(self, point: str) -> bool:
        often = self._often.get(point)
        if often is None or self.is_over or self._draws[point].random() >= often:
            return False
        self.taken[point] += 1
        return True

    def lingers_s(self, point: str) -> float:
        return self._draws[point].uniform(*LINGERS_S) if self.happens(point) else 0.0
