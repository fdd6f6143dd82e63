"""A link that is cut, told from a peer that stands still: others hear whom this peer does not.

Everyone speaks to all its fellows at least every second heartbeat. So all last heard a peer that
stands still at about the same time, and one to which only the link is cut is heard elsewhere long
after it was last heard here. Machines that are busy delay the first, never make the second.
"""

from collections.abc import Collection, Mapping

from p2p_dtfm.core.liveness.rhythm import SECOND_NS
from p2p_dtfm.core.messages.message_bounds import MISSED_LIMIT

MILLISECOND_NS = 1_000_000
ASKED_NS = 3 * SECOND_NS
"""So long a question stands."""
TELLERS = 2
"""Whose word counts, where there are as many: one alone may lie."""


class SecondHand:
    """What fellows ask of one another, and what they answered."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[frozenset[str], int]] = {}
        """By who asks: whom it misses, and when it said so."""
        self._heard_ns: dict[str, dict[str, int]] = {}
        """Of whom is missed, by who said so: when it was heard there last, on this peer's clock."""

    def asks(self, sender: str, missed: Collection[str], now_ns: int) -> bool:
        """Whether it misses somebody that it did not miss before: then it is answered at once."""
        before, _ = self._asked.pop(sender, (frozenset(), 0))
        names = frozenset(sorted(missed)[:MISSED_LIMIT])
        if names:
            self._asked[sender] = (names, now_ns)
        return bool(names - before)

    def wanted(self, now_ns: int) -> set[str]:
        """Whom anybody misses."""
        return {
            name
            for names, asked_ns in self._asked.values()
            if now_ns - asked_ns <= ASKED_NS
            for name in names
        }

    def told(self, teller: str, silent_ms: Mapping[str, int], now_ns: int) -> None:
        """For how many milliseconds `teller` has not heard those whom somebody misses."""
        for name, since_ms in silent_ms.items():
            heard_ns = self._heard_ns.setdefault(name, {})
            heard_ns[teller] = max(heard_ns.get(teller, 0), now_ns - since_ms * MILLISECOND_NS)

    def heard_elsewhere_ns(self, name: str, others: int) -> int:
        """When it was heard last where `TELLERS` of the `others` say so, or all of fewer; 0: not
        so many say anything."""
        told = sorted(self._heard_ns.get(name, {}).values(), reverse=True)
        needed = max(1, min(TELLERS, others))
        return told[needed - 1] if len(told) >= needed else 0

    def is_heard(self, name: str) -> None:
        """Here, again: what others hear of it is of no use any more."""
        self._heard_ns.pop(name, None)

    def keep(self, watched: Collection[str]) -> None:
        """Forget all but these."""
        self._asked = {name: asked for name, asked in self._asked.items() if name in watched}
        self._heard_ns = {
            name: {teller: at_ns for teller, at_ns in heard_ns.items() if teller in watched}
            for name, heard_ns in self._heard_ns.items()
            if name in watched
        }
