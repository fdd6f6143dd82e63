"""Tells a link that is cut from a peer that stands still: others hear the peer behind a cut link.

Everyone speaks to all its fellows at least every second heartbeat. So all last heard a peer that
stands still at about the same time. A peer to which only the link is cut is heard elsewhere long
after it was last heard here. A busy machine may delay what all hear, but never makes it look as if
a link were cut.
"""

from collections.abc import Collection, Mapping

from p2p_dtfm.core.messages.message_bounds import MISSED_LIMIT
from p2p_dtfm.core.units import MILLISECOND_NS, SECOND_NS

ASKED_NS = 3 * SECOND_NS
"""A question stands for so long."""
FRESH_NS = SECOND_NS * 3 // 4
"""A fellow that answered within so long would have said so if it had heard the missed peer."""
TELLERS = 2
"""So many must say the same, where there are as many: one alone may lie."""


class SecondHand:
    """What fellows ask of one another, and what they answered."""

    def __init__(self) -> None:
        self._asked: dict[str, tuple[frozenset[str], int]] = {}
        """By peer that asks: whom it misses, and when it said so."""
        self._heard_ns: dict[str, dict[str, int]] = {}
        """By missed peer, by teller: when it was last heard there, on this peer's clock."""
        self._told_ns: dict[str, dict[str, int]] = {}
        """By the same keys: when the teller said so."""

    def asks(self, sender: str, missed: Collection[str], now_ns: int) -> bool:
        """Notes whom `sender` misses. Returns whether one of them is new: then it is answered at
        once."""
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
        """`silent_ms`: for how long `teller` has not heard each peer that somebody misses."""
        for name, since_ms in silent_ms.items():
            heard_ns = self._heard_ns.setdefault(name, {})
            heard_ns[teller] = max(heard_ns.get(teller, 0), now_ns - since_ms * MILLISECOND_NS)
            self._told_ns.setdefault(name, {})[teller] = now_ns

    def heard_elsewhere_ns(self, name: str, others: int) -> int:
        """When the peer was last heard, as `TELLERS` of the `others` say, or all if they are fewer;
        0: not so many say anything."""
        told = sorted(self._heard_ns.get(name, {}).values(), reverse=True)
        needed = max(1, min(TELLERS, others))
        return told[needed - 1] if len(told) >= needed else 0

    def heard_by_any_ns(
        self, name: str, heard_here_ns: int, needed: int, now_ns: int
    ) -> int | None:
        """When anybody heard the peer last; None unless `needed` others have just said when they
        did. Their words may make a silence shorter than it is here, never longer."""
        told_ns = self._told_ns.get(name, {}).values()
        if sum(now_ns - at_ns <= FRESH_NS for at_ns in told_ns) < needed:
            return None
        return max(heard_here_ns, *self._heard_ns[name].values())

    def forget(self, name: str) -> None:
        """The peer is heard here again: what others hear of it is of no use any more."""
        self._heard_ns.pop(name, None)
        self._told_ns.pop(name, None)

    def keep(self, watched: Collection[str]) -> None:
        """Forget all but these."""
        if not (self._asked or self._heard_ns or self._told_ns):  # as it nearly always is
            return
        self._asked = {name: asked for name, asked in self._asked.items() if name in watched}
        self._heard_ns = _of_these(self._heard_ns, watched)
        self._told_ns = _of_these(self._told_ns, watched)


def _of_these(
    times_ns: dict[str, dict[str, int]], watched: Collection[str]
) -> dict[str, dict[str, int]]:
    return {
        name: {teller: at_ns for teller, at_ns in by_teller.items() if teller in watched}
        for name, by_teller in times_ns.items()
        if name in watched
    }
