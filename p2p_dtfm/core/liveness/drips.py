"""Who lets the others wait for its word step after step, each time for less than a fault.

The patience with which a step is judged begins anew with each (`core.liveness.stalls`). So a member
that said its claim or its Prepared four seconds late slowed steps of a fifth of a second twenty
times, for good. Therefore this peer adds up, over the last steps, the time in which another owed
nothing but its word and had no reason to wait. A peer that computes or sends slowly is not meant:
what it owes meanwhile are tensors.

Pure: time is an argument.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping

from p2p_dtfm.core.liveness.liveness import Suspect
from p2p_dtfm.core.units import SECOND_NS

STEPS = 12
"""So many last steps count, of whatever views, since a late peer may have views changed. Machines
that do other things are late for a few steps only."""
JOINING_DIVISOR = 2
"""Where one accuses another, half of what is evidence otherwise shows which of them is at fault.
Not all see the same: a peer that computes works again meanwhile has waited for less."""
SHARE_OF_STEPS = 1, 2
"""A peer is waited for during this part of the steps' time or more, so that they take twice as long
as they could. For honest members a tenth was seen, with eight daemons on two busy cores."""
LEAST_NS = SECOND_NS // 2
"""The least wait in each step, on average: ticks, and what travels, take a part of that."""


class Drips:
    """Call `begins` with each view, and `step_over` after each step. The step in which a view
    begins is not counted."""

    def __init__(self) -> None:
        self._began_ns = 0
        self._waited: deque[dict[str, int]] = deque(maxlen=STEPS)
        self._took_ns: deque[int] = deque(maxlen=STEPS)

    def begins(self, now_ns: int) -> None:
        """Another view, or the first one."""
        self._began_ns = now_ns

    def keep(self, peers: Collection[str]) -> None:
        """Forgets what is held against all other peers: a peer that was left out begins anew."""
        for step in self._waited:
            for peer_id in step.keys() - peers:
                del step[peer_id]

    def step_over(self, waited_ns: Mapping[str, int], least_ns: int, now_ns: int) -> list[Suspect]:
        """`waited_ns`: by peer, how long its word alone was waited for in the step now over.
        `least_ns`: `LEAST_NS`, or more where this peer itself is late."""
        took_ns, self._began_ns = now_ns - self._began_ns, now_ns
        self._took_ns.append(took_ns)
        self._waited.append({peer_id: min(ns, took_ns) for peer_id, ns in waited_ns.items()})
        if len(self._took_ns) < STEPS:
            return []
        return self._found(waited_ns, least_ns)

    def join(self, doubted: Collection[str], least_ns: int) -> list[Suspect]:
        """Suspects now which of the `doubted`, one of whom accuses another, were about to be
        suspected here. Else the first member to have seen enough would go, as the only accuser."""
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
