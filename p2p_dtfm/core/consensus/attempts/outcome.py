"""What the gathered knowledge comes to once it is frozen, and who has said Ready to that."""

from dataclasses import dataclass, field

from p2p_dtfm.core.messages.agreement_messages import Ready
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.statements import ready_of, signers
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot, ViewId
from p2p_dtfm.core.recovery.restart_point import Recovery


@dataclass
class Outcome:
    """A snapshot and its plan make a view; others' Ready may come before either."""

    snapshot: Snapshot | None = None
    recovery: Recovery | None = None
    plan: Plan | NoPlan | None = None
    ready: dict[Member, Ready] = field(default_factory=dict)
    _view_id: tuple[Snapshot, ViewId] | None = None
    _ids: tuple[Snapshot, frozenset[str]] | None = None

    @property
    def view_id(self) -> ViewId | None:
        """The view id of the snapshot."""
        if self.snapshot is None:
            return None
        if self._view_id is None or self._view_id[0] is not self.snapshot:
            self._view_id = self.snapshot, self.snapshot.view_id
        return self._view_id[1]

    @property
    def contributor_ids(self) -> frozenset[str]:
        """Peer ids of those whose knowledge the snapshot is."""
        if self.snapshot is None:
            return frozenset()
        if self._ids is None or self._ids[0] is not self.snapshot:
            ids = frozenset(member.peer_id for member in self.snapshot.contributors)
            self._ids = self.snapshot, ids
        return self._ids[1]

    def take_ready(self, certificate: Certificate, verify: Verify) -> None:
        """Take from a certificate each Ready that this peer lacks, or has for another view."""
        assert self.snapshot is not None
        lacks = (m for m in self.snapshot.contributors if not self.has_said_ready(m))
        missing = {member.peer_id for member in lacks}
        said = signers(certificate, verify, missing)
        for member, signature in certificate.ready:
            if member in said and member in self.snapshot.contributors:
                self.ready[member] = ready_of(certificate, member, signature)

    def has_said_ready(self, member: Member) -> bool:
        """Whether the member has said Ready to the view of this snapshot, and not to another
        one."""
        ready = self.ready.get(member)
        return ready is not None and ready.view == self.view_id

    @property
    def is_agreed(self) -> bool:
        """Whether all contributors have said Ready to the same view."""
        return self.snapshot is not None and all(
            map(self.has_said_ready, self.snapshot.contributors)
        )

    @property
    def may_be_agreed(self) -> bool:
        """Whether so many have said Ready that it is worth looking who."""
        return self.snapshot is not None and len(self.ready) >= len(self.snapshot.contributors)
