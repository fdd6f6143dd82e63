"""What a home knows of who may be in a run by invitation, and by what it came itself."""

import contextlib
import logging
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import (
    CHAIN_LIMIT,
    SKEW_S,
    Link,
    Revocation,
    bound_to,
    open_chain,
    run_mark,
    sign_link,
    sign_revocation,
)
from p2p_dtfm.core.protocol.invited.guest_list import HANDED_ON_LIMIT, GuestList, SavedGuests
from p2p_dtfm.core.protocol.invited.line import (
    ADDRESSES_LIMIT,
    ASK_AGAIN,
    KEY_BYTES,
    InvitationLine,
    require_in_time,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.wire import Introduction
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify
from p2p_dtfm.ports import disk, now

FILE_NAME = "guests.json"
FILE_LIMIT_BYTES = 16 << 20
OWN_LINES_LIMIT = 1024

log = logging.getLogger("p2p_dtfm")


class _Kept(msgspec.Struct, frozen=True):
    """In the run's directory."""

    chain: tuple[Signed, ...] = ()
    guests: SavedGuests = SavedGuests()
    lines: dict[str, int] = {}
    """That this peer has given, by name, and until when they last: it may take them back, also
    before anybody has come by them."""


class GuestBook:
    """Of one run by invitation. `guests` is there once the run is known."""

    def __init__(self, directory: Path, run_digest: str, identity: Identity) -> None:
        self.run_digest = run_digest
        self.directory_key = b""
        self.changes = 0
        """How often somebody's invitation was taken back, as far as is known here."""
        self.guests: GuestList | None = None
        self._path = directory / FILE_NAME
        self._identity = identity
        self._kept = self._read()

    @property
    def introduction(self) -> Introduction | None:
        """None where this peer needs none: the founder."""
        return Introduction(self._kept.chain) if self._kept.chain else None

    @property
    def known(self) -> GuestList:
        """Once the run is known."""
        assert self.guests is not None
        return self.guests

    def come_by(self, line: InvitationLine) -> None:
        """This peer's user has pasted it. Raises `UserError` if it has expired, or is damaged."""
        self.directory_key = line.directory_key
        came_by_it = len(self._kept.chain) > 1 and self._kept.chain[:-1] == line.chain
        if came_by_it or not line.chain:
            return
        require_in_time(line, int(now.wall_s()))
        try:
            signer = identity_of_seed(line.seed).sign
            chain = bound_to(line.chain, line.run_digest, self._identity.peer_id, signer)
        except PeerFault as fault:
            raise UserError(f"the invitation is no good: {fault.cause}", ASK_AGAIN) from fault
        self._kept = msgspec.structs.replace(self._kept, chain=chain)

    def open_for(self, spec: RunSpec) -> GuestList:
        """The run is known. Raises `UserError` where this peer may not be in it."""
        admission, me = spec.admission, self._identity.peer_id
        self.directory_key = bytes.fromhex(admission.key)
        guests = GuestList(admission.founder, self.run_digest, verify)
        guests.restore(self._kept.guests)
        try:
            guests.introduce(me, self._kept.chain, 0)
        except PeerFault as fault:
            raise not_let_in(fault.cause) from fault
        self.guests = guests
        self.save()
        return guests

    def introduced(self, sender: str, chain: tuple[Signed, ...], came_before: bool = False) -> None:
        """Somebody says by what it comes. `came_before`: views say that it has been let in.
        Raises `PeerFault`."""
        before = self.known.chain_of(sender)
        self.known.introduce(sender, chain, int(now.wall_s()), came_before)
        if self.known.chain_of(sender) != before:
            self.save()

    def told_of(self, chains: Sequence[tuple[Signed, ...]]) -> None:
        """A member says by what others have come. Raises `PeerFault` at the first that is none."""
        known, is_news = self.known, False
        try:
            for chain in chains[:HANDED_ON_LIMIT]:
                is_news |= known.told_of(chain)
        finally:
            if is_news:
                self.save()

    def revoked(self, signed: Sequence[Signed]) -> None:
        """By word of another member; it may have come a long way, and what is wrong with one keeps
        no other from being heard. Raises `PeerFault` at the end if one is forged."""
        is_news, fault = False, None
        for each in signed:
            try:
                is_news |= self.known.revoke(each)
            except PeerFault as found:
                fault = fault or found
        if is_news:
            self.changes += 1
            self.save()
        if fault is not None:
            raise fault

    def invite(self, expires_s: int, may_invite: bool, addresses: Sequence[str]) -> InvitationLine:
        """A new line. Raises `UserError` if this peer may not invite. `expires_s`: Unix time."""
        own = self._kept.chain
        guests, me = self.known, self._identity.peer_id
        chain = guests.chain_of(me)
        if chain is not None and not (chain.may_invite and len(own) + 2 <= CHAIN_LIMIT):
            raise UserError(
                "this peer may not invite others",
                "ask the founder: a line of p2p-dtfm invite --may-invite lets its peer invite",
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
        link = Link(run_mark(self.run_digest), holder, True, may_invite, ends_s)
        signed = sign_link(link, me, self._identity.sign)
        run, some = bytes.fromhex(self.run_digest), tuple(addresses)[:ADDRESSES_LIMIT]
        line = InvitationLine(run, self.directory_key, seed, (*own, signed), some)
        self._note_own(holder, ends_s, now_s)
        return line

    def _note_own(self, holder: str, ends_s: int, now_s: int) -> None:
        lines = {name: end for name, end in self._kept.lines.items() if end + SKEW_S > now_s}
        lines[holder] = ends_s
        newest = dict(list(lines.items())[-OWN_LINES_LIMIT:])
        self._kept = msgspec.structs.replace(self._kept, lines=newest)
        self.save()

    def _gave(self, line: InvitationLine) -> bool:
        """Whether this peer stands in a line's own chain: it, or whom it has invited, gave it."""
        founder, me = self.known.founder, self._identity.peer_id
        try:
            chain = open_chain(line.chain, founder, self.run_digest, line.holder, verify)
        except PeerFault:
            return False
        return me in chain.holders[1::2]

    def revoke(self, holder: str, line: InvitationLine | None = None) -> None:
        """Take back what a peer, or a line, was given; `line`: as it was pasted. Raises
        `UserError` if that is not this peer's to do."""
        guests, me = self.known, self._identity.peer_id
        chain = guests.chain_of(holder)
        words = [Revocation(run_mark(self.run_digest), holder, False, int(now.wall_s()))]
        if chain is not None:  # nor does it come back by another key
            words.append(
                msgspec.structs.replace(words[0], holder=chain.line, stays_for_guests=True)
            )
        signed = [sign_revocation(word, me, self._identity.sign) for word in words]
        is_own = holder in self._kept.lines or (line is not None and self._gave(line))
        if not (is_own or guests.may_revoke(me, holder)):
            raise UserError(
                f"it was not this peer that invited {holder}",
                "ask the founder, or whoever invited it",
            )
        try:
            self.revoked(signed)
        except PeerFault as fault:
            raise UserError(f"cannot be revoked: {fault.cause}") from fault

    def save(self) -> None:
        """A full disk costs the memory, and nothing else."""
        if self.guests is not None:
            self._kept = msgspec.structs.replace(self._kept, guests=self.guests.saved())
        try:
            data = msgspec.json.encode(self._kept)
            disk.write_whole(self._path, data, disk.ONLY_OWNER)
        except OSError as error:
            log.warning("cannot write down who was invited: %s", error)

    def _read(self) -> _Kept:
        try:
            with self._path.open("rb") as file:
                kept = msgspec.json.decode(file.read(FILE_LIMIT_BYTES), type=_Kept)
        except FileNotFoundError:
            return _Kept()
        except (OSError, msgspec.MsgspecError, RecursionError) as error:
            aside = self._path.with_suffix(".damaged")
            log.warning("who was invited is not known: %s (set aside as %s)", error, aside)
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            return _Kept()
        return kept


def book_of(
    directory: Path, identity: Identity, line: InvitationLine | None, recalled: RunSpec | None
) -> GuestBook | None:
    """By the line that was pasted, or what this home remembers; None where no run is known to be
    by invitation."""
    if line is not None and line.chain:
        book = GuestBook(directory, line.run_digest, identity)
        book.come_by(line)
        return book
    if recalled is not None and recalled.admission.is_invited:
        book = GuestBook(directory, recalled.digest(), identity)
        book.directory_key = bytes.fromhex(recalled.admission.key)
        return book
    return None


def not_let_in(cause: str) -> UserError:
    """Members have answered, and do not let this peer in."""
    return UserError(
        f"the members do not let this peer in: {cause}",
        (ASK_AGAIN, "then join with it: p2p-dtfm --invite LINE"),
        exit_code=5,
    )
