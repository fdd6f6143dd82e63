"""Whether this peer's work has changed so much that all are told before the next heartbeat.

Others judge who holds up a step by what each says of its work, and heartbeats say so only every
second or two. Of a step of half a second they hear nothing, and what a peer said in an earlier one
excuses it. So a peer that is in one place of a step for longer than `SETTLED_NS` says so at once. A
peer that has been in a step for so long, in whatever places, says so once. If a peer has said
nothing of a step for `HEARD_WITHIN_NS`, it has kept that to itself.

Pure: time is an argument.
"""

from p2p_dtfm.core.messages.work import Kind, Work
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

SETTLED_NS = SECOND_NS // 4
"""Machines that do other things are as late even with what takes no time."""
HEARD_WITHIN_NS = SECOND_NS
"""Twice the sum of `SETTLED_NS`, a tick, and the way to the others."""

_Place = tuple[ViewId, int, bool, bool, frozenset[tuple[str, Kind]]]


class EarlyNews:
    """Ask `is_due` at each tick."""

    def __init__(self) -> None:
        self._told: _Place | None = None
        self._stands: _Place | None = None
        self._since_ns = 0
        self._step_since_ns = 0

    def is_due(self, work: Work | None, now_ns: int) -> bool:
        """Whether this peer is to say now where it stands; True once for each place. `work` is
        None while it takes no steps."""
        place = _place(work) if work is not None else None
        if _step(place) != _step(self._stands):
            self._step_since_ns = now_ns
        if place != self._stands:
            self._stands, self._since_ns = place, now_ns
        is_first = _step(place) != _step(self._told)
        since_ns = self._step_since_ns if is_first else self._since_ns
        if place in (None, self._told) or now_ns - since_ns < SETTLED_NS:
            return False
        self._told = place
        return True


def _step(place: _Place | None) -> tuple[ViewId, int] | None:
    return place[:2] if place is not None else None


def _place(work: Work) -> _Place:
    """Where a peer stands, without the microbatch: with many, there would be news all the time."""
    lacks = frozenset((lack.peer_id, lack.kind) for lack in work.lacks)
    return work.view, work.step, work.computes, work.fetches, lacks
