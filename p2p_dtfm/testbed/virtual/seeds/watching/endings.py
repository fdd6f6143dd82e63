"""Who ends by itself: a daemon lives until it is told to leave, or until its run is complete.

One that says that the run is complete, and is wrong, ends like one that is right.
"""

from collections.abc import Callable, Sequence

from p2p_dtfm.daemon.peers.run_source import RunComplete
from p2p_dtfm.testbed.virtual.peer import Peer


class Endings:
    """Of one seed, looked at all the time. `peers`: those of whom it is asked."""

    def __init__(
        self, peers: Callable[[], Sequence[Peer]], everybody: Sequence[Peer], steps: int
    ) -> None:
        """`everybody`: one of whom has told of the last of `steps`, if that is committed."""
        self._peers = peers
        self._everybody = everybody
        self._last = steps - 1
        self._looked_at: dict[str, object] = {}
        """Of each the newest that has ended."""

    def look(self, now_s: float) -> str:
        """Who has ended since the last look and had no reason to, if somebody has."""
        for peer in self._peers():
            ended = peer.ended
            if ended is None or not ended.done() or self._looked_at.get(peer.name) is ended:
                continue
            self._looked_at[peer.name] = ended
            if problem := self._problem_of(peer, now_s):
                return problem
        return ""

    def _problem_of(self, peer: Peer, now_s: float) -> str:
        """Another error is judged in the end."""
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
        """Also by the word of one that has died since."""
        told = (event for peer in self._everybody for event in peer.events())
        return any(
            event["event"] == "step" and event["step"] == self._last and event["at_s"] <= now_s
            for event in told
        )
