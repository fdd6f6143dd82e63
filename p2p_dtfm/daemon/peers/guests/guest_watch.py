"""Members whose invitation was taken back leave with the next view, and all members hear of it."""

import asyncio
from collections.abc import Callable

from p2p_dtfm.core.consensus.actions import Actions
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.daemon.peers.guests.guest_book import TOLD_AT_ONCE, GuestBook
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.wire import Revocations
from p2p_dtfm.ports import now

LOOK_EVERY_S = 0.5
"""How often this peer looks. The others have as long to hear of a withdrawn invitation, before this
peer asks for a view without that guest."""
CHAINS_AT_ONCE = 64
"""Chains in one message: each has 4 KiB at most."""
HANDING_ON = 3
"""How many members of a view tell newcomers by which invitations others have come."""


class GuestWatch:
    """A member's watch over guests. `do` carries out what the agreement asks for."""

    def __init__(
        self,
        book: GuestBook,
        agreement: Agreement,
        messenger: Messenger,
        do: Callable[[Actions], None],
    ) -> None:
        self._book = book
        self._agreement = agreement
        self._messenger = messenger
        self._do = do
        self._told: tuple[ViewId | None, int] = (None, 0)
        self._told_words = frozenset[Signed]()
        """Revocations told in this view. A new one is told alone, or each would cost all of
        them."""
        self._seen: tuple[ViewId | None, frozenset[str]] = (None, frozenset())
        self._held_up: tuple[ViewId | None, frozenset[str]] = (None, frozenset())

    async def keep(self) -> None:
        """Look for ever. Raises `UserError` once this peer itself is out."""
        try:
            while True:
                self.look()
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            self._book.save()

    def look(self) -> None:
        """Look once. Raises `UserError`."""
        self._require_own()
        self._name_members()
        self._hand_round()
        self._turn_away()
        self._hand_on()
        if not self._tell():
            self._hold_up()
        self._book.write_heard()

    def _require_own(self) -> None:
        guests = self._book.known
        if (reason := guests.refusal(self._messenger.me)) is not None:
            raise UserError(
                f"this peer is no longer in the run: {reason}",
                "ask whoever invited you; what it has trained stays with the others",
                exit_code=5,
            )
        self._messenger.introduction = self._book.introduction

    def _name_members(self) -> None:
        views = (self._agreement.view, self._agreement.next_view)
        members = (peer_id for view in views if view is not None for peer_id in view.member_ids)
        self._book.known.members = frozenset(members)

    def _turn_away(self) -> None:
        """Turn away newcomers whose invitation was taken back while they waited to be let in."""
        for joiner in self._agreement.joiners:
            if self._book.known.refusal(joiner.peer_id) is not None:
                self._agreement.turn_away(joiner.peer_id, now.monotonic_ns())

    def _hand_on(self) -> None:
        """Tell members that are new in a view by which invitations others have come. They have seen
        nobody show that. The line of a guest that is away now may have ended when it comes back."""
        view = self._agreement.view
        if view is None or view.id == self._seen[0]:
            return
        self._book.met(view.snapshot.records)  # the members' names are kept as well
        members, before = frozenset(view.member_ids), self._seen[1]
        self._seen = (view.id, members)
        stayed = members & before or members
        if self._messenger.me not in sorted(stayed)[:HANDING_ON]:
            return
        if not (chains := self._book.known.handed_on()):
            return
        for peer_id in sorted(members - before):
            self._messenger.tell(peer_id, Revocations((), chains))

    def _hand_round(self) -> None:
        """Tell all members by which invitations those have come that asked this peer to be let in.
        A guest need show its own to nobody else. The others would not know that it is taken back,
        and this peer would be alone to say so: one word against another."""
        members = self._book.known.members
        chains = self._book.came_by(members)
        for first in range(0, len(chains), CHAINS_AT_ONCE):
            message = Revocations((), tuple(chains[first : first + CHAINS_AT_ONCE]))
            for peer_id in sorted(members):
                self._messenger.tell(peer_id, message)

    def _tell(self) -> bool:
        """Tell what is new of revocations; returns whether there was anything. A member that is new
        in a view knows nothing yet, so each new view is told all."""
        guests, view = self._book.known, self._agreement.view
        state = (view.id if view is not None else None, self._book.changes)
        if view is None or state == self._told or not guests.revocations:
            return False
        told = self._told_words if view.id == self._told[0] else frozenset()
        revocations = tuple(word for word in guests.revocations if word not in told)
        self._told, self._told_words = state, frozenset(guests.revocations)
        for first in range(0, len(revocations), TOLD_AT_ONCE):
            message = Revocations(revocations[first : first + TOLD_AT_ONCE])
            for peer_id in view.member_ids:
                self._messenger.tell(peer_id, message)
        return True

    def _hold_up(self) -> None:
        guests, agreement = self._book.known, self._agreement
        view = agreement.view
        out, told = frozenset[str](), self._held_up
        for each in (view, agreement.next_view):
            members = each.member_ids if each is not None else ()
            out |= {peer_id for peer_id in members if guests.refusal(peer_id) is not None}
        state = (view.id if view is not None else None, out)
        if not out or state == told:
            return
        self._held_up = state
        reasons = {peer_id: guests.refusal(peer_id) or "" for peer_id in out}
        self._do(agreement.hold_up(reasons, now.monotonic_ns()))
