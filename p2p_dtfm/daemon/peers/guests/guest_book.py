"""What a home knows of the guests of a run by invitation."""

import secrets
from collections.abc import Callable, Collection, Iterable, Sequence

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import (
    CHAIN_LIMIT,
    SKEW_S,
    ChainLink,
    Revocation,
    holder_of,
    links_of,
    open_chain,
    run_mark,
    sign_link,
    sign_revocation,
)
from p2p_dtfm.core.protocol.invited.guest_list import GUESTS_LIMIT, HANDED_ON_LIMIT, GuestList
from p2p_dtfm.core.protocol.invited.line import (
    ADDRESSES_LIMIT,
    KEY_BYTES,
    InvitationLine,
)
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.guests.own_invitation import OwnInvitation, not_let_in
from p2p_dtfm.daemon.peers.wire import Introduction, Revocations
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.contacts.identity import identity_of_seed, verify
from p2p_dtfm.ports import now

OWN_LINES_LIMIT = 1024
TOLD_AT_ONCE = 512
"""Limit of revocations in one message."""
WRITE_EVERY_S = 10.0
"""What others say may be news again and again, and a file of all guests takes a tenth of a second.
If this machine fails, guests heard since the last write are asked again."""


class GuestBook:
    """The guests of one run by invitation, whose founder is known."""

    def __init__(self, own: OwnInvitation, known: GuestList) -> None:
        self.run_digest = own.run_digest
        self.known = known
        self.changes = 0
        """How often an invitation was taken back, as far as is known here."""
        self._asked: dict[str, None] = {}
        """Guests that asked this peer to be let in, and are not in a view yet."""
        self._own = own
        self._identity = own.identity
        self._is_written = True
        self._written_s = -WRITE_EVERY_S

    def introduced(self, sender: str, chain: tuple[Signed, ...], came_before: bool = False) -> None:
        """Take what a peer says of its own invitation. `came_before`: views say that it has been
        let in. Raises `PeerFault`."""
        before = self.known.chains_of(sender)
        self.known.introduce(sender, chain, int(now.wall_s()), came_before)
        if self.known.chains_of(sender) != before:
            self._heard()

    def asked(self, guest: str) -> None:
        """A guest asks this peer to be let in. It may have shown its invitation to nobody else."""
        put_newest(self._asked, guest, None, GUESTS_LIMIT)

    def came_by(self, members: Collection[str]) -> list[tuple[Signed, ...]]:
        """What those of `members` have shown that asked this peer to be let in. It is given
        once."""
        asked, known = [it for it in self._asked if it in members], self.known
        for peer_id in asked:
            del self._asked[peer_id]
        shown = (known.shown_that_holds(it) or known.shown_by(it) for it in asked)
        return [it for it in shown if it]

    def told_of(
        self, chains: Sequence[tuple[Signed, ...]], came_before: Callable[[str], bool]
    ) -> None:
        """Take what a member says of others' invitations. `came_before`: whether a peer is or was
        in a view. Raises `PeerFault` at the first that is none."""
        known, is_news = self.known, False
        try:
            for chain in chains[:HANDED_ON_LIMIT]:
                is_news |= known.told_of(chain, came_before(holder_of(chain)))
        finally:
            if is_news:
                self._heard()

    def told_instead(self, peer_id: str) -> Introduction | Revocations | None:
        """What a peer is told that may not hear where this one stands. One whose invitation was
        taken back may have slept meanwhile, and hears that. To another this peer shows its own
        invitation: a guest of others then says where it stands itself. None: nothing."""
        if self.known.refusal(peer_id) is not None:
            return Revocations(self.known.words_against(peer_id)[:TOLD_AT_ONCE])
        return self._own.introduction

    def revoked(self, signed: Sequence[Signed]) -> None:
        """Take revocations that another member passes on. They may have come a long way, so a bad
        one keeps no other from being heard. Raises `PeerFault` at the end if one is forged."""
        is_news, fault = False, None
        if len(signed) > TOLD_AT_ONCE:  # looking at each takes time
            raise PeerFault(f"takes back {len(signed)} invitations at once")
        for each in signed:
            try:
                is_news |= self.known.revoke(each)
            except PeerFault as found:
                fault = fault or found
        if is_news:
            self.changes += 1
            self.show_what_holds()
            self._heard()
        if fault is not None:
            raise fault

    @property
    def introduction(self) -> Introduction | None:
        """What this peer shows now; None for a founder that came by no line."""
        return self._own.introduction

    def show_what_holds(self) -> None:
        """Show by what else this peer has come, where what it showed was taken back."""
        me = self._identity.peer_id
        shown = self.known.shown_that_holds(me)
        if shown and shown != self._own.kept.chain:
            self.known.introduce(me, shown, 0)
            self._own.kept = msgspec.structs.replace(self._own.kept, chain=shown)

    def invite(self, expires_s: int, may_invite: bool, addresses: Sequence[str]) -> InvitationLine:
        """Make a new line. Raises `UserError` if this peer may not invite. `expires_s`: Unix
        time."""
        guests, me = self.known, self._identity.peer_id
        # by a friend's line the founder has only come back: its own lines begin with itself
        own = () if me == guests.founder else links_of(self._own.kept.chain)
        chain = guests.chain_of(me)
        if chain is not None and not (chain.may_invite and len(own) + 2 <= CHAIN_LIMIT):
            raise UserError(
                "this peer may not invite others",
                "ask the founder: a line of p2p-dtfm invite --may-invite lets its peer invite",
            )
        if chain is not None and guests.closed_to_new(chain) is not None:
            raise UserError(
                "the line that this peer came by is closed: whom it invites would not be let in",
                "ask the founder, or a member that came by another line, to invite instead",
            )
        ends_s, now_s = expires_s, int(now.wall_s())
        if chain is not None and chain.expires_s < ends_s:
            ends_s = chain.expires_s
            if ends_s <= now_s:
                raise UserError(
                    "the line that this peer came by has ended, and a line of its own would end "
                    "with it",
                    "ask the founder, or a member whose line lasts longer, to invite instead",
                )
        seed = secrets.token_bytes(KEY_BYTES)
        holder = identity_of_seed(seed).peer_id
        link = ChainLink(run_mark(self.run_digest), holder, True, may_invite, ends_s)
        signed = sign_link(link, me, self._identity.sign)
        run, some = bytes.fromhex(self.run_digest), tuple(addresses)[:ADDRESSES_LIMIT]
        line = InvitationLine(run, self._own.directory_key, seed, (*own, signed), some)
        self._note_own(holder, ends_s, now_s)
        return line

    def _note_own(self, holder: str, ends_s: int, now_s: int) -> None:
        lines = {name: end for name, end in self._own.kept.lines.items() if end + SKEW_S > now_s}
        lines[holder] = ends_s
        newest = dict(list(lines.items())[-OWN_LINES_LIMIT:])
        self._own.kept = msgspec.structs.replace(self._own.kept, lines=newest)
        self.save()

    def _gave(self, line: InvitationLine) -> bool:
        """Whether this peer, or a peer that it has invited, gave this line: it then stands in the
        line's chain."""
        founder, me = self.known.founder, self._identity.peer_id
        try:
            chain = open_chain(line.chain, founder, self.run_digest, line.holder, verify)
        except PeerFault:
            return False
        return me in chain.holders[1::2]

    def revoke(self, holder: str, line: InvitationLine | None = None) -> None:
        """Take back what a peer, or a line, was given. `line`: as it was pasted. Raises `UserError`
        if that is not this peer's to do."""
        guests, me = self.known, self._identity.peer_id
        words = [Revocation(run_mark(self.run_digest), holder, False, int(now.wall_s()))]
        for chain in guests.chains_of(holder):  # nor does the peer come back by another key
            words.append(
                msgspec.structs.replace(words[0], holder=chain.line, stays_for_guests=True)
            )
        signed = [sign_revocation(word, me, self._identity.sign) for word in words]
        is_own = holder in self._own.kept.lines or (line is not None and self._gave(line))
        if not (is_own or guests.may_revoke(me, holder)):
            raise UserError(
                f"it was not this peer that invited {holder}",
                "ask the founder, or whoever invited it",
            )
        try:
            self.revoked(signed)
        except PeerFault as fault:
            raise UserError(f"cannot be revoked: {fault.cause}") from fault
        self.save()

    def _heard(self) -> None:
        self._is_written = False
        self.write_heard()

    def met(self, records: Iterable[PeerRecord]) -> None:
        """Note the names of these members. They are written with the next change: if a name is
        lost, its owner is named by id, which costs no more."""
        names = self._own.kept.names | {it.peer_id: it.called for it in records}
        newest = dict(list(names.items())[-GUESTS_LIMIT:])
        self._own.kept = msgspec.structs.replace(self._own.kept, names=newest)

    @property
    def guests(self) -> dict[str, str | None]:
        """Guests whose invitation holds, present or away, with the name that each used last. None
        where a guest has never said its name here."""
        known, names = self.known, self._own.kept.names
        admitted = (it for it in known.saved().guests if known.refusal(it) is None)
        return {peer_id: names.get(peer_id) for peer_id in admitted}

    def has_invited(self, guest: str) -> bool:
        """Whether this peer may take back the invitation of `guest`."""
        me, chains = self._identity.peer_id, self.known.chains_of(guest)
        return me == self.known.founder or any(me in chain.holders[1:-1:2] for chain in chains)

    def write_heard(self) -> None:
        """Write what others have said, if it is time to. This is called again and again."""
        if not self._is_written and now.monotonic_s() - self._written_s >= WRITE_EVERY_S:
            self.save()

    def save(self) -> None:
        own = self._own
        own.kept = msgspec.structs.replace(own.kept, guests=self.known.saved())
        self._is_written, self._written_s = own.write(), now.monotonic_s()


def book_of(own: OwnInvitation, spec: RunSpec) -> GuestBook:
    """The guest book, once the run is known. Raises `UserError` where this peer may not be in the
    run."""
    admission = spec.admission
    own.directory_key = bytes.fromhex(admission.key)
    guests = GuestList(admission.founder, own.run_digest, verify)
    guests.restore(own.kept.guests)
    try:
        guests.introduce(own.identity.peer_id, own.kept.chain, 0)
    except PeerFault as fault:
        raise not_let_in(fault.cause) from fault
    book = GuestBook(own, guests)
    book.show_what_holds()
    book.save()
    return book
