"""Whether all that run come to be in one view, once nothing is done to anybody any more.

The sides of a swarm that stays divided train on apart, each to the end, and come to the same
losses. Nothing of what became of the run shows it.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.testbed.virtual.peer import Peer

APART_S = 60.0
"""Since somebody is in a view. Mostly it takes some five seconds, and up to half a minute."""
NOBODY_S = 180.0
"""While nobody is in a view. A founder waits for its fellows first, and for a minute for those that
it was told to expect. So long after the last fault all are in one view, as is promised."""


class Together:
    """Watches one seed. `peers` are those that are watched."""

    def __init__(self, peers: Callable[[], Sequence[Peer]]) -> None:
        self._peers = peers
        self._since_s: float | None = None
        """Since when they are not in one view."""
        self._divided_s: float | None = None
        """Since when they are not, though somebody is in a view."""

    def look(self, now_s: float) -> str:
        """Who is where, if they have not been in one view for too long; else empty."""
        running = [peer for peer in self._peers() if peer.is_running and not peer.is_away]
        views = {peer.name: peer.view_id for peer in running}
        are_in_one = len(set(views.values())) <= 1 and None not in views.values()
        is_somebody = any(views.values())
        self._since_s = None if are_in_one else self._since_s or now_s
        self._divided_s = None if are_in_one or not is_somebody else self._divided_s or now_s
        where = ", ".join(f"{name} in {view or 'none'}" for name, view in views.items())
        for since_s, limit_s in ((self._divided_s, APART_S), (self._since_s, NOBODY_S)):
            if since_s is not None and now_s - since_s > limit_s:
                return f"not in one view for {limit_s:.0f} s, though nothing is done: {where}"
        return ""

    def disturb(self) -> None:
        """Begins anew, as something is done to somebody."""
        self._since_s = self._divided_s = None
