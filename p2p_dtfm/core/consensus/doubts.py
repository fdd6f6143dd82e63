"""Whom a peer holds for lost, or at fault, and what it keeps of that from attempt to attempt."""

from dataclasses import dataclass, field

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.membership.accusers import Accusers
from p2p_dtfm.core.protocol.snapshot import Member


@dataclass
class Doubts:
    """Doubts of one life; each field says what ends it."""

    accusers: Accusers = field(default_factory=Accusers)
    """Outlives views; it forgets what is long ago."""
    suspects: set[Member] = field(default_factory=set)
    """Who is held for lost, until it is heard again or a view without it takes over."""
    distrusted: set[Member] = field(default_factory=set)
    """Who holds up the step or sends what nobody should, until a view takes over."""
    carried: set[Member] = field(default_factory=set)
    """Newcomers in doubt that made an attempt fail, until the next one begins and accuses them."""

    def heed(self, attempt: Attempt, me: Member, now_ns: int) -> None:
        """It is over: whose accusations were idle is kept."""
        self.accusers.heed(attempt.number, attempt.charges, attempt.heard, me, now_ns)

    def heed_conflicts(self, attempt: Attempt, now_ns: int) -> None:
        """It is over without a view: who was in doubt with whom is kept as well."""
        in_doubt = [*attempt.distrust.doubts, *attempt.distrust.even]
        self.accusers.heed_doubts(in_doubt, now_ns)
