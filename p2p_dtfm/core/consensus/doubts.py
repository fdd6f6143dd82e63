"""Which peers this one holds for lost, or at fault, and what it keeps of that from attempt to
attempt."""

from dataclasses import dataclass, field

from p2p_dtfm.core.consensus.attempts.attempt import Attempt
from p2p_dtfm.core.membership.accusers import Accusers
from p2p_dtfm.core.protocol.snapshot import Member


@dataclass
class Doubts:
    """Doubts of one life; each field says what ends it."""

    accusers: Accusers = field(default_factory=Accusers)
    """Outlives views, and forgets by itself what is long ago."""
    suspects: set[Member] = field(default_factory=set)
    """Members held for lost, until they are heard again or a view without them takes over."""
    distrusted: set[Member] = field(default_factory=set)
    """Members that hold up the step or send what nobody should, until a view takes over."""
    carried: set[Member] = field(default_factory=set)
    """Newcomers in doubt that made an attempt fail, until the next attempt begins and accuses
    them."""

    def heed(self, attempt: Attempt, me: Member, now_ns: int) -> None:
        """The attempt is over: keep whose accusations were idle."""
        self.accusers.heed(attempt.number, attempt.charges, attempt.heard, me, now_ns)

    def heed_conflicts(self, attempt: Attempt, now_ns: int) -> None:
        """The attempt is over: keep who was in doubt with whom. A planned attempt that ends with a
        view does not come here."""
        in_doubt = [*attempt.distrust.doubts, *attempt.distrust.even]
        self.accusers.heed_doubts(in_doubt, now_ns)
