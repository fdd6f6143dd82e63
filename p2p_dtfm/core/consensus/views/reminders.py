"""What a peer can show to those that it was in a view with, should they have forgotten that.

A peer that has lost its disk knows no view, and founds anew where it reaches nobody. It believes
nobody who says that they were together; but it believes its own signatures. What it has signed
counts as if it knew it. The others keep these signatures on disk, too: all may start again before
they meet it.
"""

from collections.abc import Collection, Mapping

import msgspec

from p2p_dtfm.core.consensus.views.known_views import KnownViews
from p2p_dtfm.core.messages.agreement_messages import Active, KnownView, Reminder
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.statements import is_stated, signers
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.core.recovery.view import View

REMINDED_MEMBERS_LIMIT = 256
"""Nobody is reminded of a view with more members: a Standing must not become larger than the gate
lets in."""


class Signatures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Signatures of the members of one view: that they agreed on it, and that they took it over."""

    certificate: Certificate
    active: tuple[Active, ...]


class Reminders:
    """For each peer that is no longer in the present view: the newest view that this peer was in
    with it. These are as many as newcomers are told of (`KnownViews.origins`)."""

    def __init__(self) -> None:
        self._kept: dict[ViewId, Signatures] = {}

    def goes_on(
        self,
        before: View | None,
        active: Mapping[Member, Active],
        views: KnownViews,
        members: Collection[Member],
    ) -> None:
        """This peer goes on from the view `before` to the next one, which has these members."""
        self.recall(_signatures(before, active))
        wanted = {known.view for known in views.origins(members)}
        self._kept = {view: held for view, held in self._kept.items() if view in wanted}

    def with_present(
        self, view: View | None, active: Mapping[Member, Active]
    ) -> tuple[Signatures, ...]:
        """What a later start is to recall: also of the present view, as far as it is taken over."""
        return (*self._kept.values(), *_signatures(view, active))

    def recall(self, kept: Collection[Signatures]) -> None:
        self._kept |= {it.certificate.view: it for it in kept}

    def of(self, peer_id: str, views: KnownViews) -> Reminder | None:
        """A reminder for another peer: the newest view that this one can show it that it was in."""
        for view in sorted(self._kept, reverse=True):
            certificate, active = self._kept[view].certificate, self._kept[view].active
            said = next((it for it in active if it.sender.peer_id == peer_id), None)
            ready = tuple(it for it in certificate.ready if it[0].peer_id == peer_id)
            if ready and said is not None and views.has_come_from(view):
                return Reminder(msgspec.structs.replace(certificate, ready=ready), said)
        return None


def _signatures(view: View | None, active: Mapping[Member, Active]) -> tuple[Signatures, ...]:
    """The signatures of a view that is not too large to be shown."""
    if view is None or view.certificate is None or len(view.members) > REMINDED_MEMBERS_LIMIT:
        return ()
    plain = tuple(said for said in active.values() if said.certificate is None)
    return (Signatures(view.certificate, plain),)


def reminded_of(
    reminder: Reminder, me: Member, views: KnownViews, verify: Verify
) -> KnownView | None:
    """The view that the reminder shows, if this peer has been in it, and may have forgotten
    that."""
    certificate, active = reminder.certificate, reminder.active
    was = active.sender
    is_mine = was.peer_id == me.peer_id and was in certificate.members
    if not is_mine or active.view != certificate.view or not views.may_have_forgotten(was):
        return None
    if was not in signers(certificate, verify, {me.peer_id}) or not is_stated(active, verify):
        return None
    return KnownView(certificate.view, certificate.members, certificate.plan_digest)
