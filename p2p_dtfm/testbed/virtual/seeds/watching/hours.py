"""Peers that take part outside of the hours that their owners give.

All else about such a daemon is as it should be: no other invariant asks when it works.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.testbed.virtual.peer import Peer

SEES_WITHIN_S = 3.0
"""A daemon looks at the clock each second, and so does this watch."""


class OutsideHours:
    """Watches one seed, now and then. `peers` are those that are watched."""

    def __init__(self, peers: Callable[[], Sequence[Peer]]) -> None:
        self._peers = peers
        self._within: dict[str, object] = {}
        """By name: the daemon that took part while its hours lasted. A daemon that somebody called
        back outside of them goes on until they end next."""
        self._since_s: dict[str, float] = {}
        """By name: when a daemon was first seen to go on outside of its hours."""

    def look(self, now_s: float) -> str:
        """Who goes on for too long; empty, if nobody does."""
        for peer in self._peers():
            if not _takes_part(peer):
                self._since_s.pop(peer.name, None)
            elif not peer.is_outside_hours:
                self._within[peer.name] = peer.daemon
                self._since_s.pop(peer.name, None)
            elif self._within.get(peer.name) is peer.daemon:
                since_s = self._since_s.setdefault(peer.name, now_s)
                if now_s - since_s > SEES_WITHIN_S:
                    return f"{peer.name} takes part though its hours are over"
        return ""


def _takes_part(peer: Peer) -> bool:
    """It takes part by itself: nobody has told it to leave, and it takes turns."""
    is_here = peer.is_running and not peer.is_away and peer.takes_part
    is_here &= peer.process is not None and peer.process.takes_turns
    daemon = peer.daemon
    return is_here and daemon is not None and not daemon.is_to_leave and daemon.pause_reason is None
