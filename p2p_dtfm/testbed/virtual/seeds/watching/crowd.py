"""In a crowd, while faults go on: newcomers are let in, a spare says so and why, and a peer that
goes home is soon gone.

Once all is mended `together` and `kept_out` ask for more. But a crowd holds itself up: an attempt
at a view that waits for each of fifty ends as late as the slowest of them.
"""

from collections.abc import Callable, Collection, Sequence

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.testbed.virtual.peer import Peer

LET_IN_WITHIN_S = 45.0
"""Time since a newcomer came, and since anybody last crashed. A peer that dies before it has taken
its place undoes the view that was agreed on with it, for all. Undisturbed, fifty are in after some
twenty seconds."""
GONE_WITHIN_S = 60.0
TOLD_WITHIN_S = 10.0
"""Time in a view without a stage."""
TRAINS = "training"
NOT_LET_IN = "is let in by nobody"


class Crowd:
    """Watches one seed, each second. `peers` are those that are watched; `leaving` the names of
    those that were told to go home; `crashes_s` the times at which somebody died."""

    def __init__(
        self,
        peers: Callable[[], Sequence[Peer]],
        leaving: Collection[str],
        crashes_s: Sequence[float] = (),
    ) -> None:
        self._peers = peers
        self._leaving = leaving
        self._crashes_s = crashes_s
        self._since_s: dict[tuple[str, str], float] = {}
        """Since when something is wrong, by peer and what."""

    def look(self, now_s: float) -> str:
        """What has been wrong for too long; empty, if nothing."""
        running = [it for it in self._peers() if it.is_running and _takes_turns(it)]
        is_somebody = any(peer.is_in_a_view for peer in running)
        found, last_crash_s = dict[tuple[str, str], float](), max(self._crashes_s, default=0.0)
        for peer in running:
            for what, limit_s in self._wrong_of(peer, is_somebody):
                key = peer.name, what
                since_s = found[key] = self._since_s.get(key, now_s)
                if what == NOT_LET_IN:
                    since_s = max(since_s, last_crash_s)
                if now_s - since_s > limit_s:
                    return f"{peer.name} {what} for {limit_s:.0f} s: {peer.standing()}"
        self._since_s = found
        return ""

    def _wrong_of(self, peer: Peer, is_somebody: bool) -> list[tuple[str, float]]:
        """What is wrong with the peer now, and how long that may last."""
        if peer.name in self._leaving:
            return [("is on its way home", GONE_WITHIN_S)]
        if not peer.is_in_a_view:
            return [(NOT_LET_IN, LET_IN_WITHIN_S)] if is_somebody else []
        if not _is_spare(peer):
            return []
        told = peer.daemon.status_json() if peer.daemon is not None else {}
        says_why = told.get("reason") and told.get("state") != TRAINS
        return [] if says_why else [("has no stage, and does not say so", TOLD_WITHIN_S)]


def _takes_turns(peer: Peer) -> bool:
    return peer.process is not None and peer.process.takes_turns


def _is_spare(peer: Peer) -> bool:
    """It has no stage in the plan of its view."""
    api = peer.daemon.status_api if peer.daemon is not None else None
    view = api.participant.membership.agreement.view if api and api.participant else None
    plan = view.plan if view is not None else None
    return isinstance(plan, Plan) and plan.stage_of(peer.peer_id) is None
