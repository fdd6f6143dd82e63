"""How late this peer itself runs: a peer that hears late, and answers late, is patient with others.

Lifeguard's self-doubt. Where a machine has less time than its programs want, ticks come late. So do
the answers of all others that share the machine: what looks like their silence is this peer's own
lateness. Only lateness that lasts counts; on a machine with time to spare nothing changes.
"""

from collections import deque

from p2p_dtfm.core.units import SECOND_NS

PUNCTUAL_NS = SECOND_NS * 3 // 10
"""Ticks are a tenth of a second apart. By what they are further apart than this, they are late."""
ASLEEP_NS = 10 * SECOND_NS
"""A longer gap is a sleep, and says nothing about how late this peer runs when it is awake."""
TICKS = 32
"""The mean lateness is taken over about so many ticks."""
FEW = 8
"""With so few fellows patience does not grow: what one of them may take is known."""
LONGEST = 4
"""Patience becomes at most so many times as long."""
LAPSES_LIMIT = 64
PATIENT_ABOVE = 16
"""With more fellows than this, patience grows: each speaks less often."""
THINNEST = 32
"""At this many fellows patience has doubled, and grows no more."""


def of_many_ns(fellows: int, patience_ns: int) -> int:
    """How long a peer waits for each of so many fellows."""
    return patience_ns * min(max(fellows, PATIENT_ABOVE), THINNEST) // PATIENT_ABOVE


class Lateness:
    """Call `ticked` with each tick: deadlines grow with how late this peer is on average."""

    def __init__(self) -> None:
        self._last_ns: int | None = None
        self._late_ns = 0

    def ticked(self, now_ns: int) -> None:
        """The loop has come round."""
        gap_ns = 0 if self._last_ns is None else now_ns - self._last_ns
        self._last_ns = now_ns
        if gap_ns < ASLEEP_NS:
            self._late_ns += (max(0, gap_ns - PUNCTUAL_NS) - self._late_ns) // TICKS

    def stretched_ns(self, patience_ns: int, fellows: int) -> int:
        """The patience of this peer in a crowd. With 16 fellows, and half a second late on average,
        it is twice as long."""
        late_ns = self._late_ns * fellows // FEW if fellows > FEW else 0
        return min(LONGEST * patience_ns, patience_ns + patience_ns * late_ns // SECOND_NS)


class Lapses:
    """How late this peer's own loop was at worst, lately. Others may share its machine, or have one
    like it: then their loops may be as late."""

    def __init__(self, lately_ns: int) -> None:
        self._lately_ns = lately_ns
        self._late_ns: deque[tuple[int, int]] = deque(maxlen=LAPSES_LIMIT)
        """(when, by how much) of each lapse that no later one reaches."""

    def note(self, late_ns: int, now_ns: int) -> None:
        """The loop came round so much too late."""
        while self._late_ns and self._late_ns[-1][1] <= late_ns:
            self._late_ns.pop()
        self._late_ns.append((now_ns, late_ns))

    def longest_ns(self, now_ns: int) -> int:
        """The worst lapse within the last while; 0 if the loop was punctual."""
        recent = (late_ns for at_ns, late_ns in self._late_ns if now_ns - at_ns < self._lately_ns)
        return next(recent, 0)
