"""How long one peer is silent while it lives: what is usual for it shows when a silence is not.

A peer that speaks twice a second on a quiet machine is missed after four seconds. On a machine that
does other things, too, longer silences are usual, and it is given several times as long. No mean
and deviation are used, unlike in phi-accrual detectors. What makes a living peer silent (a
checkpoint, another program) is rare and long. The longest silence of the last minute tells of it.
"""

from collections import deque
from operator import itemgetter

from p2p_dtfm.core.units import SECOND_NS

SLOT_NS = SECOND_NS
SLOTS = 60
"""The longest silence counts of each of so many last seconds in which the peer was heard."""
KNOWN_SLOTS = 20
"""After so many slots a peer's rhythm is known well."""
FEWEST_SLOTS = 5
"""Before so many slots nothing is known of the rhythm."""
FACTOR = 3
"""A living peer is not silent for this many times its longest silence."""


class Rhythm:
    """One peer's rhythm. Call `heard` with each silence that has ended."""

    def __init__(self) -> None:
        self._longest_ns: deque[tuple[int, int]] = deque(maxlen=SLOTS)
        """(number of the slot, longest silence that ended in it)."""
        self._usual_ns = 0
        """The longest of these silences: asked for much more often than anything is heard."""

    def heard(self, silent_ns: int, now_ns: int) -> None:
        """The peer was heard now, after a silence of `silent_ns`."""
        slot, goes_ns = now_ns // SLOT_NS, 0
        if self._longest_ns and self._longest_ns[-1][0] == slot:
            silent_ns = max(silent_ns, self._longest_ns.pop()[1])
        elif len(self._longest_ns) == SLOTS:
            goes_ns = self._longest_ns[0][1]
        self._longest_ns.append((slot, silent_ns))
        if silent_ns >= self._usual_ns:
            self._usual_ns = silent_ns
        elif goes_ns == self._usual_ns:  # the longest one went
            self._usual_ns = max(map(itemgetter(1), self._longest_ns))

    @property
    def known_slots(self) -> int:
        """In how many seconds the peer was heard, up to `KNOWN_SLOTS`."""
        return min(KNOWN_SLOTS, len(self._longest_ns))

    @property
    def is_known(self) -> bool:
        return self.known_slots == KNOWN_SLOTS

    def bound_ns(self, least_ns: int, most_ns: int) -> int:
        """A longer silence than this is evidence."""
        if len(self._longest_ns) < FEWEST_SLOTS:
            return most_ns
        return min(most_ns, max(least_ns, FACTOR * self._usual_ns))
