"""Peers that run and are in no view while others are in one. Once nothing is done to anybody they
are let in.

A peer that is kept out hears at the end that the run is complete, as if it had never been there.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.testbed.virtual.peer import Peer

OUTSIDE_S = 30.0
"""A peer that died, and lost its place, is back after some twelve seconds."""
ALONE_S = 60.0
"""Where most have slept, one slow machine may be left. Alone it takes twenty seconds for a step,
and then it gives newcomers the model."""


class KeptOut:
    """Watches one seed. `peers` are those that are watched."""

    def __init__(self, peers: Callable[[], Sequence[Peer]], limit_s: float = OUTSIDE_S) -> None:
        self._peers = peers
        self._limit_s = limit_s
        self._since_s: dict[str, float] = {}

    def look(self, now_s: float) -> str:
        """Who is out for too long; empty, if nobody is."""
        peers = [peer for peer in self._peers() if peer.is_running]
        others = {peer.name for peer in peers if peer.is_in_a_view}
        waiting = {peer.name for peer in peers if not peer.is_let_in}
        outside = waiting - others if others else set()
        self._since_s = {name: self._since_s.get(name, now_s) for name in outside}
        late = [name for name, since_s in self._since_s.items() if now_s - since_s > self._limit_s]
        if not late:
            return ""
        for_s = f"{self._limit_s:.0f} s"
        return f"{min(late)} is in no view for {for_s}, though nothing is done to anybody"

    def disturb(self) -> None:
        """Begins anew, as something is done to somebody."""
        self._since_s.clear()
