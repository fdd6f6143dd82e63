"""Who keeps an agreed view from being taken over, though it takes its steps and answers.

A planned view is taken over with the first step of which every Prepared says that all are ready for
the view. One stage-holder that never says so could keep out all newcomers, and keep a plan in force
that serves it. Nothing else that it does would be wrong.
"""

from collections.abc import Iterable

from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

PATIENCE_NS = 24 * SECOND_NS
"""A shorter wait may be honest: a member that cannot hear a newcomer gives that view up after eight
seconds, and another is agreed on."""
STEPS_ENOUGH = 3
"""After so many steps no delay excuses it: what was heard too late for one Prepared is in the next.
"""
REASON = "does not say that it is ready for the next view, as most are"


class Vouches:
    """Call `committed` with each step; all that have seen the step come to the same."""

    def __init__(self) -> None:
        self._view: ViewId | None = None
        self._since_ns: dict[str, int] = {}
        self._steps: dict[str, int] = {}

    def committed(
        self, said: Iterable[Prepared], next_view: ViewId | None, now_ns: int
    ) -> list[Suspect]:
        """Who is suspected now. `next_view`: the agreed view that was not taken over with this
        step."""
        if next_view != self._view:
            self._view, self._since_ns, self._steps = next_view, {}, {}
        prepared = list(said)
        silent = sorted(it.peer_id for it in prepared if it.ready_for != next_view)
        if next_view is None or 2 * len(silent) >= len(prepared):
            return []
        for peer_id in silent:
            self._since_ns.setdefault(peer_id, now_ns)
            self._steps[peer_id] = self._steps.get(peer_id, 0) + 1
        return [Suspect(peer_id, REASON) for peer_id in silent if self._is_late(peer_id, now_ns)]

    def _is_late(self, peer_id: str, now_ns: int) -> bool:
        waited_ns = now_ns - self._since_ns[peer_id]
        return waited_ns >= PATIENCE_NS and self._steps[peer_id] >= STEPS_ENOUGH
