"""Whether all that run are in one view: once nothing is done to anybody any more they come to be.

The sides of a swarm that stays divided train on apart, each to the end, and come to the same
losses: nothing of what became of the run shows it.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.testbed.virtual.peer import Peer

APART_S = 60.0
"""Mostly some five; who has lost all others waits for half a minute before it goes on alone."""


class Together:
    """Of one seed. `peers`: those of whom it is asked."""

    def __init__(self, peers: Callable[[], Sequence[Peer]]) -> None:
        self._peers = peers
        self._since_s: float | None = None

    def look(self, now_s: float) -> str:
        """Who is where, if they are not in one view for too long."""
        running = [peer for peer in self._peers() if peer.is_running and not peer.is_away]
        views = {peer.name: peer.view_id for peer in running}
        if len(set(views.values())) <= 1 and None not in views.values():
            self._since_s = None
            return ""
        if self._since_s is None:
            self._since_s = now_s
        if now_s - self._since_s <= APART_S:
            return ""
        where = ", ".join(f"{name} in {view or 'none'}" for name, view in views.items())
        return f"not in one view for {APART_S:.0f} s, though nothing is done to anybody: {where}"

    def disturb(self) -> None:
        """Something is done to somebody."""
        self._since_s = None
