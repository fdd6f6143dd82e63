"""What a peer knows of the view that it is in."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from p2p_dtfm.core.commit.ledger import Ledger
from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.messages.agreement_messages import Active, Standing
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View


@dataclass(frozen=True)
class LostLayers:
    """Each view since `since_ns` has lacked some layers."""

    since_ns: int
    had_all: frozenset[str]
    """The members of the newest view of this peer that had all layers."""


@dataclass
class Present:
    """The view that this peer is in."""

    said_active: Active
    view: View | None = None
    ledger: Ledger | None = None
    taken_over_ns: int = 0
    committed_ns: int = 0
    """When the latest step of the view committed; 0: none has."""
    step_ns: int = 0
    """How long that step took."""
    active_members: dict[ViewId, dict[Member, Active]] = field(default_factory=dict)
    active_sent_ns: int = 0
    last_commit: tuple[Signed, ...] = ()
    lost: LostLayers | None = None
    may_repeat_steps: int = 0
    """How many steps a failure may cost, as the newest view with a plan has said."""
    end: Standing | None = None
    """Where this peer stood when the run's last step was committed: perhaps nobody is in that view
    now."""
    accepts_loss: bool = False
    met_ns: int = 0
    record_names: frozenset[bytes] | None = None

    @property
    def newest_commit(self) -> tuple[Signed, ...]:
        """All Prepared of the last committed step, which may have been one of the view before."""
        here = self.ledger.last_commit if self.ledger is not None else ()
        return here or self.last_commit

    def commits(self, now_ns: int) -> None:
        """A step commits."""
        self.step_ns = self.under_way_ns(now_ns)
        self.committed_ns = now_ns

    def under_way_ns(self, now_ns: int) -> int:
        """How long the open step has been under way."""
        return max(0, now_ns - max(self.committed_ns, self.taken_over_ns))

    def slept(self, moved_ns: Callable[[int], int]) -> None:
        """Time asleep counts neither for the open step nor as waiting for layers."""
        self.taken_over_ns = moved_ns(self.taken_over_ns)
        if self.committed_ns:
            self.committed_ns = moved_ns(self.committed_ns)
        if self.lost is not None:
            self.lost = replace(self.lost, since_ns=moved_ns(self.lost.since_ns))

    def has_waited(self, patience_ns: int, now_ns: int) -> bool:
        """Whether this peer has waited for lost layers for `patience_ns`."""
        return self.lost is not None and now_ns - self.lost.since_ns >= patience_ns

    def agrees_to_loss(self, timing: AgreementTiming, now_ns: int) -> bool:
        """Whether this peer agrees to go back to an older state: it has asked for that, or has
        waited for half of `lost_layers_ns`."""
        return self.accepts_loss or self.has_waited(timing.lost_layers_ns // 2, now_ns)
