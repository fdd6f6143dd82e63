"""What comes of a tensor that was lost on its way to a peer, or from it."""

from enum import Enum, auto

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

OFTEN = 6
"""Half as many stops as put the member that stops the steps in doubt (`core.membership.accusers`).
Else a peer that hangs up on it once in each step has the others blame it for the stops."""
OFTEN_NS = 60 * SECOND_NS
OFTEN_STEPS = 6
"""Losses within so many steps count as well, however long these take. One for each step is not
enough."""


class AfterLoss(Enum):
    REPEAT = auto()
    """The link may be at fault: the step is repeated, in a view that accuses nobody."""
    NOTHING = auto()
    """It is the same trouble: one line that breaks loses all frames under way, and each lane says
    so."""
    SUSPECT = auto()
    """The peer is at fault: a tensor was lost in the repeated step as well, or steps are repeated
    for this peer again and again."""


class LostTensors:
    """The losses of tensors: with which peer, and in which views."""

    def __init__(self) -> None:
        self._first: dict[str, ViewId] = {}
        """By peer: the view of the first loss since the last commit."""
        self._late: dict[ViewId, tuple[int, int, set[str]]] = {}
        """By view with a loss of late: when that was, after how many commits, and which peers."""
        self._commits = 0

    def remedy(self, peer_id: str, view: ViewId, now_ns: int) -> AfterLoss:
        """What to do after a tensor was lost in this view, on its way to the peer or from it."""
        is_often = self._is_often(peer_id, view, now_ns)
        first = self._first.get(peer_id)
        if first is None:
            self._first[peer_id] = view
            return AfterLoss.SUSPECT if is_often else AfterLoss.REPEAT
        return AfterLoss.NOTHING if first == view else AfterLoss.SUSPECT

    def _is_often(self, peer_id: str, view: ViewId, now_ns: int) -> bool:
        """Whether `OFTEN` other views lost tensors within a minute, or a few steps, and one of them
        with this peer. Lines break, and those of one machine all at once: a few times nobody is at
        fault."""
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
