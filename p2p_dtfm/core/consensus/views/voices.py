"""The voices of those that are gone: each counts for the part of a swarm that it was last with.

A founder lets others in and leaves, or its machine dies. They train all night, and in the morning
somebody wakes up who was alone with the founder before. If those alone counted who are left of the
view in common, the sleeper would count more than all of them.
"""

from collections.abc import Collection

from p2p_dtfm.core.messages.agreement_messages import Standing
from p2p_dtfm.core.messages.certificate import Certificate
from p2p_dtfm.core.messages.message_bounds import FAREWELLS_LIMIT
from p2p_dtfm.core.messages.statements import signers
from p2p_dtfm.core.protocol.signed import Verify
from p2p_dtfm.core.recovery.view import View

SIGNERS_LIMIT = 64
"""Signatures in all farewells together, and in the view that they are told of: each takes time."""


class Farewells:
    """The certificates by which this peer shows with whom those who are gone were last."""

    def __init__(self) -> None:
        self._kept: tuple[Certificate, ...] = ()
        """The newest first."""

    def shown_with(self, view: Certificate) -> tuple[Certificate, ...]:
        """The farewells that this peer shows where it tells of its view."""
        return self._kept if len(view.ready) <= SIGNERS_LIMIT else ()

    def goes_on(self, before: View | None, view: View) -> None:
        """This peer goes on from a view to the next one. A peer that leaves signs the view without
        it; one that dies has signed the last one with it."""
        newest = [view.certificate, before.certificate if before is not None else None]
        kept: list[Certificate] = []
        known, room = set(view.member_ids), SIGNERS_LIMIT
        for certificate in (*newest, *self._kept):
            if certificate is None or _names(certificate) <= known:
                continue  # all its signers are members, or have signed a newer one that is kept
            room -= len(certificate.ready)
            if room < 0 or len(kept) == FAREWELLS_LIMIT:
                break
            kept.append(certificate)
            known |= _names(certificate)
        self._kept = tuple(kept)

    def forget(self) -> None:
        """This peer goes over to another part of the swarm."""
        self._kept = ()


def voices_of(standing: Standing, said: Collection[str], verify: Verify) -> dict[str, int]:
    """The peers that count for the view, each with the number of the view that it signed last.
    These are `said`, which have signed the standing's own view, and peers that are gone.

    A peer that is gone counts where more than half of those that it was last with stand behind the
    view, be it by such a voice themselves.
    """
    found = dict.fromkeys(said, standing.view.number)
    line, room = {standing.view, *standing.ancestors}, SIGNERS_LIMIT
    for farewell in sorted(standing.farewells, key=lambda it: it.view, reverse=True):
        room -= len(farewell.ready)
        if room < 0:
            break
        members = [member.peer_id for member in farewell.members]
        is_theirs = 2 * sum(name in found for name in members) > len(members)
        if is_theirs and farewell.view in line:
            gone = _names(farewell) - found.keys()
            signed = {member.peer_id for member in signers(farewell, verify, gone)}
            found |= dict.fromkeys(signed, farewell.view.number)
    return found


def _names(certificate: Certificate) -> frozenset[str]:
    return frozenset(member.peer_id for member, _ in certificate.ready)
