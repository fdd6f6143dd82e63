"""What an attempt at a view holds, by what belongs together."""

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from p2p_dtfm.core.consensus.attempts.wide import Wide
from p2p_dtfm.core.membership.newcomers import WAITING_WIDE_LIMIT
from p2p_dtfm.core.messages.agreement_messages import Accusation, Charge, Contribution
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import ITEMS_LIMIT
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

CHARGES_TOLD = 2048
"""In one message; others hear twice as many (`message_bounds.CHARGES_LIMIT`). Of sixty-four
members each half may accuse the other."""
PARKED_LIMIT = 64
"""Contributions of peers that nobody has named yet; in a swarm of many as many as one member may
name (`WAITING_WIDE_LIMIT`), since a storm may come before the word of those that name it."""
PARKED_LIMIT_BYTES = 4 << 20
"""Together, as they came: opened they take eight times as much."""
ROUNDS_LIMIT = 64
"""Rounds of Gather that may each start the deadline anew."""
DEADLINES_LIMIT = 8
"""So many deadlines after its beginning no news starts the deadline of a Gather anew."""


@dataclass
class AttemptClock:
    """What happened when, by this peer's own clock."""

    began_ns: int = 0
    progress_ns: int = 0
    sent_ns: int = 0
    frozen_ns: int = 0
    heard_ns: dict[Member, int] = field(default_factory=dict)

    @classmethod
    def started(cls, now_ns: int) -> "AttemptClock":
        """Of an attempt that begins now."""
        return cls(began_ns=now_ns, progress_ns=now_ns, sent_ns=now_ns)

    def gets_on(self, round_: int, gather_ns: int, now_ns: int) -> None:
        """This peer has learnt something, and says so for the `round_`th time."""
        if round_ <= ROUNDS_LIMIT and now_ns - self.began_ns < DEADLINES_LIMIT * gather_ns:
            self.progress_ns = now_ns

    def sleep(self, moved_ns: Callable[[int], int]) -> None:
        """This peer did not listen: the others have as much time as before."""
        self.began_ns = moved_ns(self.began_ns)
        self.progress_ns = moved_ns(self.progress_ns)


@dataclass
class SetAside:
    """Contributions that do not count."""

    contradicted: dict[Member, Signed] = field(default_factory=dict)
    """Who has signed two contributions, and the second one: neither counts, and both are shown."""
    parked: dict[Member, tuple[Signed, Contribution]] = field(default_factory=dict)
    """Of peers that no one who counts has named so far."""

    def park(self, signed: Signed, part: Contribution, is_wide: bool) -> None:
        """As many as there is room for; of one peer the newest."""
        held = self.parked.get(part.member)
        if held is not None and held[0] is signed:
            return
        others = {member: it for member, it in self.parked.items() if member != part.member}
        size_bytes = len(signed.payload) + sum(len(it.payload) for it, _ in others.values())
        limit = WAITING_WIDE_LIMIT if is_wide else PARKED_LIMIT
        if len(others) < limit and size_bytes <= PARKED_LIMIT_BYTES:
            self.parked[part.member] = (signed, part)


@dataclass
class Evidence:
    """What is said against peers."""

    absent: set[Member] = field(default_factory=set)
    called_absent: dict[Member, set[Member]] = field(default_factory=dict)
    """By silent peer, whose word it is that it is silent."""
    charges: dict[Accusation, Charge] = field(default_factory=dict)

    def told(self, me: Member, members: Collection[Member]) -> tuple[Charge, ...]:
        """As many as others hear: this peer's own before those of members, and these before those
        of newcomers, of whom many that accuse everybody would have nothing be heard."""
        order = sorted(self.charges)
        if len(order) > CHARGES_TOLD:
            order.sort(key=lambda it: (it.by != me, it.by not in members))
        return tuple(self.charges[item] for item in order[:CHARGES_TOLD])

    def absent_told(
        self, silent: Collection[Member], members: Collection[Member]
    ) -> tuple[Member, ...]:
        """As many of the silent as others hear: members before newcomers, of whom many that there
        are not would have nothing be heard."""
        order = sorted(silent)
        if len(order) > ITEMS_LIMIT:
            order = sorted(sorted(order, key=lambda it: it not in members)[:ITEMS_LIMIT])
        return tuple(order)


@dataclass
class PassedOn:
    """What others need to follow, and who has been sent it."""

    newcomers: dict[Member, Signed] = field(default_factory=dict)
    """Records of who is named by contributors, for those who have not met them."""
    certificates: dict[ViewId, Certificate] = field(default_factory=dict)
    """Of views that contributors are in."""
    told: set[str] = field(default_factory=set)
    """Who was sent this peer's contribution."""
    said_all_of: int = 0
    """Contributions that it had when it said last that it waits for nobody."""
    mediated: set[Accusation] = field(default_factory=set)
    """Whose ends were sent all that this peer knows."""
    wide: Wide | None = None
    """In a swarm of many."""
