"""The voices of those that are gone: each counts for the part of a swarm that it was last with.

A founder lets others in and leaves, or its machine dies; they train all night, and in the morning
somebody wakes up who was alone with the founder before. By those alone who are left of the view in
common, the sleeper would count more than all of them.
"""

from collections.abc import Collection, Iterable

from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import FAREWELLS_LIMIT
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.view import View

SIGNERS_LIMIT = 64
"""Of views of more nobody's farewell is kept or looked at: each signature takes time."""


class Farewells:
    """The certificates by which this peer shows whom those who are gone were last with."""

    def __init__(self) -> None:
        self.kept: tuple[Certificate, ...] = ()
        """The newest first."""

    def goes_on(self, before: View | None, view: View) -> None:
        """From a view to the next one. Who leaves signs the one without it, who dies the last."""
        members = set(view.member_ids)
        certificates = [view.certificate]
        if before is not None:
            certificates.append(before.certificate)
        for certificate in reversed(certificates):
            if certificate is None or len(certificate.ready) > SIGNERS_LIMIT:
                continue
            if not _names(certificate) <= members:
                others = (it for it in self.kept if it.view != certificate.view)
                self.kept = (certificate, *others)[:FAREWELLS_LIMIT]

    def forget(self) -> None:
        """This peer goes over to another part."""
        self.kept = ()


def voices_of(standing: Standing, said: Collection[str], verify: Verify) -> dict[str, int]:
    """Who is gone and counts for the view, with the number of the view that it signed last; `said`
    have signed the standing's own.

    Each counts where more than half of those that it was last with stand behind the view, be it by
    such a voice themselves.
    """
    found = dict.fromkeys(said, standing.view.number)
    if len(standing.certificate.ready) > SIGNERS_LIMIT:
        return found
    line = {standing.view, *standing.ancestors}
    for farewell in _newest_first(standing.farewells, line):
        members = [member.peer_id for member in farewell.members]
        if 2 * sum(name in found for name in members) > len(members):
            gone = _names(farewell) - found.keys()
            signed = {member.peer_id for member in signers(farewell, verify, gone)}
            found |= dict.fromkeys(signed, farewell.view.number)
    return found


def _newest_first(farewells: Iterable[Certificate], line: set[ViewId]) -> list[Certificate]:
    small = (it for it in farewells if it.view in line and len(it.ready) <= SIGNERS_LIMIT)
    return sorted(small, key=lambda it: it.view, reverse=True)


def _names(certificate: Certificate) -> frozenset[str]:
    return frozenset(member.peer_id for member, _ in certificate.ready)
