"""Who lets the others wait for its word step after step, each time for less than a fault.

The patience with which a step is judged begins anew with each (`core.liveness.stalls`): a member
that said its claim or its Prepared four seconds late slowed steps of a fifth of a second twenty
times, for good. So of the last steps it counts how much of their time went by while one peer
owed nothing but its word and had no reason to wait. Who computes or sends slowly is not meant: what
it owes meanwhile are tensors.

Pure: time is an argument.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.units import SECOND_NS

STEPS = 12
"""Of whatever views: who is late may have them changed. Machines that do other things are late for
a few."""
JOINING_DIVISOR = 2
"""Where one accuses another, half of what is evidence alone is enough to say which of them is at
fault: not all see the same, who computes works again meanwhile has waited for less."""
SHARE_OF_STEPS = 1, 2
"""So much of their time or more: steps take twice as long as they could. Of honest members a tenth
was seen, with eight daemons on two busy cores."""
LEAST_NS = SECOND_NS // 2
"""Of each step, on average: ticks, and what travels, take a part of that."""


class Drips:
    """`begins` with each view, `step_over` after each step. The one in which a view begins is not
    counted."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._waited: deque[dict[str, int]] = deque(maxlen=STEPS)
        self._took_ns: deque[int] = deque(maxlen=STEPS)

    def begins(self, now_ns: int) -> None:
        """Another view, or the first one."""
        self._began_ns = now_ns

    def keep(self, peers: Collection[str]) -> None:
        """Of all others nothing is held against them: who was left out begins anew."""
        for step in self._waited:
            for peer_id in step.keys() - peers:
                del step[peer_id]

    def step_over(self, waited_ns: Mapping[str, int], least_ns: int, now_ns: int) -> list[Suspect]:
        """`waited_ns`: by peer, for how long its word alone was waited for in the step now over.
        `least_ns`: `LEAST_NS`, or more where this peer itself is late."""
        took_ns, self._began_ns = now_ns - self._began_ns, now_ns
        self._took_ns.append(took_ns)
        self._waited.append({peer_id: min(ns, took_ns) for peer_id, ns in waited_ns.items()})
        if len(self._took_ns) < STEPS:
            return []
        return self._found(waited_ns, least_ns)

    def join(self, doubted: Collection[str], least_ns: int) -> list[Suspect]:
        """Somebody accuses, or is accused by, one of these: who was about to be suspected here is
        so now. Whoever was the first to have seen enough would be out for being the only one."""
        if len(self._took_ns) * JOINING_DIVISOR < STEPS:
            return []
        return self._found(doubted, least_ns, JOINING_DIVISOR)

    def _found(self, peers: Iterable[str], least_ns: int, divisor: int = 1) -> list[Suspect]:
        return [
            Suspect(peer_id, _reason(held_ns, sum(self._took_ns)))
            for peer_id in sorted(peers)
            if self._is_drip(divisor * (held_ns := self._held_ns(peer_id)), least_ns)
        ]

    def _held_ns(self, peer_id: str) -> int:
        return sum(step.get(peer_id, 0) for step in self._waited)

    def _is_drip(self, held_ns: int, least_ns: int) -> bool:
        part, whole = SHARE_OF_STEPS
        return (
            whole * held_ns >= part * sum(self._took_ns)
            and held_ns >= len(self._took_ns) * least_ns
        )


def _reason(held_ns: int, took_ns: int) -> str:
    held_s, took_s = held_ns / SECOND_NS, took_ns / SECOND_NS
    return f"only its word was waited for in {held_s:.1f} s of the last {took_s:.1f}"
