"""Whether what this peer says of its work has changed so that all hear it before their heartbeat.

Others judge who holds up a step by what each says of its work, and a heartbeat says it every second
or two: of a step of half a second they hear nothing, and what a peer said in an earlier one excuses
it. So who is in one place of a step for longer than `SETTLED_NS` says so at once, as does once who
is in none of it for so long; and who has said nothing of a step for `HEARD_WITHIN_NS` has kept it
to itself.

Pure: time is an argument.
"""

from p2p_dtfm.core.messages.work import Kind, Work
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.units import SECOND_NS

SETTLED_NS = SECOND_NS // 4
"""Machines that do other things are as late with what takes no time."""
HEARD_WITHIN_NS = SECOND_NS
"""That, a tick, and the way to the others, twice."""

_Place = tuple[ViewId, int, bool, bool, frozenset[tuple[str, Kind]]]


class EarlyNews:
    """`is_due` at each tick."""

    def __init__(self) -> None:
        self._told: _Place | None = None
        self._stands: _Place | None = None
        self._since_ns = 0
        self._step_since_ns = 0

    def is_due(self, work: Work | None, now_ns: int) -> bool:
        """Whether to say now where this peer stands; True once for each place. `work` is None
        while it takes no steps."""
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
    """Which microbatch it is does not matter: of many there would be news all the time."""
    lacks = frozenset((lack.peer_id, lack.kind) for lack in work.lacks)
    return work.view, work.step, work.computes, work.fetches, lacks
