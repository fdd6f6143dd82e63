"""Who has all agree on another planned view, in place of one that they were about to agree on or to
take over. Whoever did so as often as it likes would keep all newcomers out."""

from p2p_dtfm.core.protocol.snapshot import Member

WEIGHT_LIMIT = 12
"""So much a member may do until a planned view takes over; whoever goes on is accused. Honest ones
stop before that (`may_replace`)."""
WEIGHT_WHILE_GATHERING = 1
"""Of who begins anew while all still gather: it may not have heard of that."""
WEIGHT_AFTERWARDS = 4
"""What they know was fixed, or all had said Ready: three times are enough."""
REMEMBERED_NS = 600_000_000_000
PEERS_LIMIT = 256


class Replacers:
    """What this peer has seen, and done itself."""

    def __init__(self) -> None:
        self._seen: dict[Member, list[tuple[int, int]]] = {}

    def replaces(self, member: Member, weight: int, now_ns: int) -> None:
        """It has opened another one."""
        before = self._seen.pop(member, [])
        late = [(it, at_ns) for it, at_ns in before if now_ns - at_ns < REMEMBERED_NS]
        self._seen[member] = [*late, (weight, now_ns)][-WEIGHT_LIMIT:]
        while len(self._seen) > PEERS_LIMIT:
            del self._seen[next(iter(self._seen))]

    def is_spent(self, member: Member) -> bool:
        """It may not do so any more."""
        return self._weight_of(member) >= WEIGHT_LIMIT

    def may_replace(self, me: Member) -> bool:
        """Whether this peer may give up what others wait for on somebody's word: a few keys, each
        with a first time, would have it accused by all others."""
        return self._weight_of(me) + WEIGHT_AFTERWARDS < WEIGHT_LIMIT

    def _weight_of(self, member: Member) -> int:
        return sum(weight for weight, _ in self._seen.get(member, ()))

    def takes_over(self) -> None:
        """A planned view."""
        self._seen = {}
