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
"""How many accusations this peer tells in one message; receivers accept twice as many
(`message_bounds.CHARGES_LIMIT`). Of sixty-four members each half may accuse the other."""
PARKED_LIMIT = 64
"""How many contributions a peer keeps whose makers nobody has named yet. In a swarm of many these
are as many as one member may name (`WAITING_WIDE_LIMIT`): a storm of newcomers may come before the
word of those that name them."""
PARKED_LIMIT_BYTES = 4 << 20
"""Bytes of all of these together, as they came: opened they take eight times as much."""
ROUNDS_LIMIT = 64
"""Rounds of Gather that may each start the deadline anew."""
DEADLINES_LIMIT = 8
"""After this many deadlines from its beginning no news starts the deadline of a Gather anew."""


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
        """The clock of an attempt that begins now."""
        return cls(began_ns=now_ns, progress_ns=now_ns, sent_ns=now_ns)

    def gets_on(self, round_: int, gather_ns: int, now_ns: int) -> None:
        """This peer has learnt something, and says so for the `round_`th time."""
        if round_ <= ROUNDS_LIMIT and now_ns - self.began_ns < DEADLINES_LIMIT * gather_ns:
            self.progress_ns = now_ns

    def sleep(self, moved_ns: Callable[[int], int]) -> None:
        """This peer was asleep and did not listen: the others have as much time as before."""
        self.began_ns = moved_ns(self.began_ns)
        self.progress_ns = moved_ns(self.progress_ns)


@dataclass
class SetAside:
    """Contributions that do not count."""

    contradicted: dict[Member, Signed] = field(default_factory=dict)
    """Members that have signed two contributions, and the second one. Neither counts, and both are
    shown."""
    parked: dict[Member, tuple[Signed, Contribution]] = field(default_factory=dict)
    """Contributions of peers that nobody whose word counts has named so far."""

    def park(self, signed: Signed, part: Contribution, is_wide: bool) -> None:
        """Keep the contribution if there is room; of one peer the newest is kept."""
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
    """By silent member: those that call it silent."""
    charges: dict[Accusation, Charge] = field(default_factory=dict)

    def told(self, me: Member, members: Collection[Member]) -> tuple[Charge, ...]:
        """As many charges as others accept: this peer's own before those of members, and these
        before those of newcomers. Many newcomers that accuse everybody would otherwise crowd out
        the rest."""
        order = sorted(self.charges)
        if len(order) > CHARGES_TOLD:
            order.sort(key=lambda it: (it.by != me, it.by not in members))
        return tuple(self.charges[item] for item in order[:CHARGES_TOLD])

    def absent_told(
        self, silent: Collection[Member], members: Collection[Member]
    ) -> tuple[Member, ...]:
        """As many of the silent as others accept, members before newcomers. Many newcomers that do
        not exist would otherwise crowd out the members."""
        order = sorted(silent)
        if len(order) > ITEMS_LIMIT:
            order = sorted(sorted(order, key=lambda it: it not in members)[:ITEMS_LIMIT])
        return tuple(order)


@dataclass
class PassedOn:
    """What others need to follow, and who has been sent it."""

    newcomers: dict[Member, Signed] = field(default_factory=dict)
    """Records of the newcomers that contributors name, for those that have not met them."""
    certificates: dict[ViewId, Certificate] = field(default_factory=dict)
    """Certificates of the views that contributors are in."""
    told: set[str] = field(default_factory=set)
    """Peers that were sent this peer's contribution."""
    said_all_of: int = 0
    """How many contributions this peer had when it last said that it waits for nobody."""
    mediated: set[Accusation] = field(default_factory=set)
    """Accusations whose ends were sent all that this peer knows."""
    wide: Wide | None = None
    """What is passed on along the overlay; None in a small swarm."""
