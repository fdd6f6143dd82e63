"""What comes of a tensor that was lost on its way to a peer, or from it."""

from enum import Enum, auto

from p2p_dtfm.core.protocol.snapshot import ViewId


class AfterLoss(Enum):
    REPEAT = auto()
    """It may be the link: the step is repeated, in a view that accuses nobody."""
    NOTHING = auto()
    """The same trouble: one line that breaks loses all frames under way, and each lane says so."""
    SUSPECT = auto()
    """What was repeated for it is lost as well: it is the peer."""


class LostTensors:
    """Since the last commit, with whom, and in which view first."""

    def __init__(self) -> None:
        self._first: dict[str, ViewId] = {}

    def remedy(self, peer_id: str, view: ViewId) -> AfterLoss:
        """A tensor is lost in this view."""
        first = self._first.get(peer_id)
        if first is None:
            self._first[peer_id] = view
            return AfterLoss.REPEAT
        return AfterLoss.NOTHING if first == view else AfterLoss.SUSPECT

    def clear(self) -> None:
        """A step has committed."""
        self._first.clear()
