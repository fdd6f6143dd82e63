"""What comes of a tensor that was lost on its way to a peer, or from it."""

from enum import Enum, auto

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

OFTEN = 6
"""Half as many stops as have a member in doubt itself (`core.membership.accusers`): else one that
hangs up on it once in each step has the others take it for who stops them."""
OFTEN_NS = 60 * SECOND_NS
OFTEN_STEPS = 6
"""Or within so many, however long these take: not with one for each."""


class AfterLoss(Enum):
    REPEAT = auto()
    """It may be the link: the step is repeated, in a view that accuses nobody."""
    NOTHING = auto()
    """The same trouble: one line that breaks loses all frames under way, and each lane says so."""
    SUSPECT = auto()
    """What was repeated for it is lost as well, or steps are repeated for it again and again: it is
    the peer."""


class LostTensors:
    """With whom, and in which view first, since the last commit; and in which views of late."""

    def __init__(self) -> None:
        self._first: dict[str, ViewId] = {}
        self._late: dict[ViewId, tuple[int, int, set[str]]] = {}
        self._commits = 0

    def remedy(self, peer_id: str, view: ViewId, now_ns: int) -> AfterLoss:
        """A tensor is lost in this view."""
        is_often = self._is_often(peer_id, view, now_ns)
        first = self._first.get(peer_id)
        if first is None:
            self._first[peer_id] = view
            return AfterLoss.SUSPECT if is_often else AfterLoss.REPEAT
        return AfterLoss.NOTHING if first == view else AfterLoss.SUSPECT

    def _is_often(self, peer_id: str, view: ViewId, now_ns: int) -> bool:
        """Whether so many views have lost some within a minute, or a few steps, and one of them
        with this peer. Lines break, and those of one machine all at once: a few times it is
        nobody."""
        self._late = {
            it: (at_ns, commits, peers)
            for it, (at_ns, commits, peers) in self._late.items()
            if now_ns - at_ns < OFTEN_NS or self._commits - commits < OFTEN_STEPS
        }
        before = [peers for it, (_, _, peers) in self._late.items() if it != view]
        self._late.setdefault(view, (now_ns, self._commits, set()))[2].add(peer_id)
        return len(before) >= OFTEN and any(peer_id in peers for peers in before)

    def clear(self) -> None:
        """A step has committed."""
        self._commits += 1
        self._first.clear()
