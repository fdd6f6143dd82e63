"""Where fellows have gone without this peer, and whether to go there as well, in place of making a
view with those that are left.

That less than half of a view have gone is no reason to leave it: the others may be there, and only
slow. An attempt shows who is there. The view that would come of it is then compared with theirs, as
two views are that meet. If it would yield as soon as it is made, it need not be made: it would only
commit anew what the others have committed.
"""

from collections.abc import Iterable

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.consensus.views.view_precedence import Side, outranks
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View

FELLOWS_VIEWS_LIMIT = 8


class FellowsViews:
    """What fellows have proven of views without this peer; forgotten with its own view."""

    def __init__(self) -> None:
        self._sides: dict[ViewId, Side] = {}

    def note(self, theirs: Side | None) -> None:
        """Keep the newest side of each view; of many views, those that count most."""
        if theirs is None or not theirs.has_plan:
            return
        self._sides[theirs.view] = theirs
        if len(self._sides) > FELLOWS_VIEWS_LIMIT:
            least = min(self._sides.values(), key=_weight)
            del self._sides[least.view]

    def counts_more(self, attempt: Attempt, view: View | None) -> ViewId | None:
        """The view of fellows that counts more than what comes of a settled attempt after a failure
        of `view`; None: no view does."""
        if view is None or attempt.planned:
            return None
        mine = _side_of_attempt(attempt, view.member_ids)
        better = [it for it in self._sides.values() if outranks(it, mine)]
        return max(better, key=_weight).view if better else None


def _weight(side: Side) -> tuple[int, int, ViewId]:
    return len(side.support), side.step, side.view


def _side_of_attempt(attempt: Attempt, member_ids: Iterable[str]) -> Side:
    """The side of the view that would come of the attempt, at best. That view may turn out not to
    train. Nobody knows yet which of two views with its number has the higher id."""
    fellows = [it for it in attempt.participants if it.peer_id in set(member_ids)]
    step = max((attempt.opened[it].step for it in fellows), default=0)
    support = frozenset(it.peer_id for it in fellows)
    return Side(True, support, step, ViewId(attempt.number + 1, ""))
