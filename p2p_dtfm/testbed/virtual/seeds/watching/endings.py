"""Daemons that end by themselves: each lives until it is told to leave, or its run is complete.

A daemon that says that the run is complete, and is wrong, ends like one that is right.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.virtual.peer import Peer


class Endings:
    """Watches one seed, all the time. `peers` are those that are watched."""

    def __init__(
        self, peers: Callable[[], Sequence[Peer]], everybody: Sequence[Peer], steps: int
    ) -> None:
        """If the last of `steps` is committed, one of `everybody` has told of it."""
        self._peers = peers
        self._everybody = everybody
        self._last = steps - 1
        self._looked_at: dict[str, object] = {}
        """The newest task of each peer that has ended."""

    def look(self, now_s: float) -> str:
        """Who has ended since the last look without a reason; empty, if nobody."""
        for peer in self._peers():
            ended = peer.ended
            if ended is None or not ended.done() or self._looked_at.get(peer.name) is ended:
                continue
            self._looked_at[peer.name] = ended
            if problem := self._problem_of(peer, now_s):
                return problem
        return ""

    def _problem_of(self, peer: Peer, now_s: float) -> str:
        """An ending without a reason. Other errors are judged in the end."""
        if peer.ended is None or peer.was_killed or peer.ended.cancelled():
            return ""
        error = peer.ended.exception()
        if error is None and (code := peer.ended.result()):
            return f"{peer.name} ended with code {code}"
        has_reason = peer.is_told_to_leave or self._is_complete(now_s)
        if has_reason or not (error is None or isinstance(error, RunComplete)):
            return ""
        why = f": {error}" if error is not None else ""
        return f"{peer.name} ended by itself before the last step{why}"

    def _is_complete(self, now_s: float) -> bool:
        """Somebody has told of the last step, perhaps one that has died since."""
        told = (event for peer in self._everybody for event in peer.events())
        return any(
            event["event"] == "step" and event["step"] == self._last and event["at_s"] <= now_s
            for event in told
        )
