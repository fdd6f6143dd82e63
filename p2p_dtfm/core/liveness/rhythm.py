"""How long one peer is silent while it lives: what is usual for it says when its silence is not.

Whoever speaks twice a second on a quiet machine is missed after four seconds; on one that does
other things, too, longer silences are usual, and it is given several times as long. Not a mean and
a deviation, as in phi-accrual detectors: what makes a living peer silent (a checkpoint, another
program) is rare and long, and the longest silence of the last minute tells of it.
"""

from collections import deque
from operator import itemgetter

from p2p_dtfm.core.units import SECOND_NS

SLOT_NS = SECOND_NS
SLOTS = 60
"""Of each of so many last seconds in which it was heard, its longest silence counts."""
KNOWN_SLOTS = 20
"""After so many a peer's rhythm is known well."""
FEWEST_SLOTS = 5
"""Before that nothing is known of it."""
FACTOR = 3
"""A living peer is not silent for this many times its longest silence."""


class Rhythm:
    """`heard` with each silence that has ended."""

    def __init__(self) -> None:
        self._longest_ns: deque[tuple[int, int]] = deque(maxlen=SLOTS)
        """By number of the slot, the longest silence that ended in it."""
        self._usual_ns = 0
        """The longest of them: asked for much more often than anything is heard."""

    def heard(self, silent_ns: int, now_ns: int) -> None:
        """It was heard now, for the first time since `silent_ns`."""
        slot, goes_ns = now_ns // SLOT_NS, 0
        if self._longest_ns and self._longest_ns[-1][0] == slot:
            silent_ns = max(silent_ns, self._longest_ns.pop()[1])
        elif len(self._longest_ns) == SLOTS:
            goes_ns = self._longest_ns[0][1]
        self._longest_ns.append((slot, silent_ns))
        if silent_ns >= self._usual_ns:
            self._usual_ns = silent_ns
        elif goes_ns == self._usual_ns:  # nobody is longer than the one that went
            self._usual_ns = max(map(itemgetter(1), self._longest_ns))

    @property
    def known_slots(self) -> int:
        """So many seconds it was heard in, up to `KNOWN_SLOTS`."""
        return min(KNOWN_SLOTS, len(self._longest_ns))

    @property
    def is_known(self) -> bool:
        return self.known_slots == KNOWN_SLOTS

    def bound_ns(self, least_ns: int, most_ns: int) -> int:
        """A silence that is longer is evidence."""
        if len(self._longest_ns) < FEWEST_SLOTS:
            return most_ns
        return min(most_ns, max(least_ns, FACTOR * self._usual_ns))
