"""The invitation by which a home comes to a run, and the file that keeps it."""

import contextlib
import logging
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import (
    accepted,
    bound_to,
    holder_of,
    holders_of,
    is_accepted,
    links_of,
)
from p2p_dtfm.core.protocol.invited.guest_list import GuestList, SavedGuests
from p2p_dtfm.core.protocol.invited.line import ASK_AGAIN, InvitationLine, require_in_time
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.daemon.peers.wire import Introduction
from p2p_dtfm.net.contacts.identity import Identity, identity_of_seed, verify
from p2p_dtfm.ports import disk, now

FILE_NAME = "guests.json"
FILE_LIMIT_BYTES = 16 << 20

log = logging.getLogger("p2p_dtfm")


class KeptInvitation(msgspec.Struct, frozen=True):
    """What the file in the run's directory holds."""

    chain: tuple[Signed, ...] = ()
    guests: SavedGuests = SavedGuests()
    lines: dict[str, int] = {}
    """Lines that this peer has given, by name, and until when they last. It may take them back,
    also before anybody has come by them."""
    names: dict[str, str] = {}
    """What members last called themselves. An invitation of an absent one is taken back by name,
    too."""


class OwnInvitation:
    """The invitation to one run, of which nothing more need be known yet. With the run's
    founder it makes a `GuestBook` (`book_of`)."""

    def __init__(self, directory: Path, run_digest: str, identity: Identity) -> None:
        """Raises `UserError` where the file is there and cannot be read."""
        self.run_digest = run_digest
        self.directory_key = b""
        self.identity = identity
        self._path = directory / FILE_NAME
        self._write_fails = False
        kept = self._read()
        self.is_founders = self._path.exists() and not kept.chain
        """Whether this is the founder's home, which came by no line."""
        self.kept = self._own(kept)

    @property
    def introduction(self) -> Introduction | None:
        """What this peer shows; None for the founder, which needs nothing."""
        return Introduction(self.kept.chain) if self.kept.chain else None

    def come_by(self, line: InvitationLine) -> None:
        """Take the line that the user has pasted. If it has expired, and this home came by another
        one since, as where a service's file still has it, that one counts. A line that this peer
        itself gave, or somebody that it has invited, gives it nothing. Raises `UserError` if it has
        expired, or is damaged."""
        self.directory_key = line.directory_key
        if self.came_by(line) or not line.chain:
            return
        try:
            require_in_time(line, int(now.wall_s()))
        except UserError as error:
            if not self.kept.chain:
                raise
            return log.warning("%s: this home keeps to the one that it came by", error.cause)
        try:
            signers = identity_of_seed(line.seed).sign, self.identity.sign
            chain = bound_to(line.chain, line.run_digest, self.identity.peer_id, *signers)
            is_below = self.identity.peer_id in holders_of(line.chain)
        except PeerFault as fault:
            raise UserError(f"the invitation is no good: {fault.cause}", ASK_AGAIN) from fault
        if not self.kept.chain or not (is_below or self._holds_without(chain)):
            self.kept = msgspec.structs.replace(self.kept, chain=chain)

    def _holds_without(self, chain: tuple[Signed, ...]) -> bool:
        """Whether this home knows that a chain was taken back, and that this peer has come by
        another one that holds. A service's file may have the line still."""
        me, kept = self.identity.peer_id, self.kept.guests
        known = GuestList(chain[0].peer_id, self.run_digest, verify)
        mine = ({me: it[me]} if me in it else {} for it in (kept.guests, kept.others))
        known.restore(SavedGuests(next(mine), (), next(mine)))
        try:
            known.introduce(me, chain, 0)
            for word in kept.revocations:
                known.revoke(word)
        except PeerFault:
            return False  # the member to which it is shown says what is wrong
        return known.shown_that_holds(me) not in ((), chain)

    def came_by(self, line: InvitationLine) -> bool:
        """Whether what this peer shows is that it comes by this line."""
        links = links_of(self.kept.chain)
        return len(links) > 1 and links[:-1] == line.chain

    def write(self) -> bool:
        """Write the file; returns whether it is there. A full disk costs the memory, told once, and
        nothing else."""
        try:
            disk.write_whole(self._path, msgspec.json.encode(self.kept), disk.ONLY_OWNER)
            disk.sync_directory(self._path.parent)  # else a power cut lets in who was just revoked
        except OSError as error:
            if not self._write_fails:
                log.warning("cannot write down who was invited: %s", error)
            self._write_fails = True
            return False
        self._write_fails = False
        return True

    def _own(self, kept: KeptInvitation) -> KeptInvitation:
        """`kept`, made fit for this identity. A chain of an earlier identity of this home is left
        out: its line, pasted again, is good for this peer as well. A chain written down before
        peers signed theirs gets this peer's signature."""
        if not kept.chain:
            return kept
        try:
            me = self.identity.peer_id
            if holder_of(kept.chain) == me:
                if is_accepted(kept.chain):
                    return kept
                chain = accepted(kept.chain, me, self.identity.sign)
                return msgspec.structs.replace(kept, chain=chain)
        except PeerFault:
            return kept  # the member to which it is shown says what is wrong
        log.warning(
            "the invitation in this home is another identity's: paste its line again, "
            "p2p-dtfm --invite LINE"
        )
        return msgspec.structs.replace(kept, chain=())

    def _read(self) -> KeptInvitation:
        try:
            with self._path.open("rb") as file:
                kept = msgspec.json.decode(file.read(FILE_LIMIT_BYTES), type=KeptInvitation)
        except FileNotFoundError:
            return KeptInvitation()
        except OSError as error:  # the file may be sound, and would be overwritten
            raise UserError(
                f"cannot read {self._path}, which says who was invited: {error.strerror}",
                "make it a file that you may read, on a disk that can be read, and start again",
            ) from error
        except (msgspec.MsgspecError, RecursionError) as error:
            aside = self._path.with_suffix(".damaged")
            log.warning("who was invited is not known: %s (set aside as %s)", error, aside)
            with contextlib.suppress(OSError):
                self._path.replace(aside)
            return KeptInvitation()
        return kept


def invitation_of(
    directory: Path, identity: Identity, line: InvitationLine | None, recalled: RunSpec | None
) -> OwnInvitation | None:
    """The invitation by the line that was pasted, or by what this home remembers. None where no run
    is known to be by invitation. Raises `UserError` for a founder that has lost its key."""
    if line is not None and line.chain:
        own = OwnInvitation(directory, line.run_digest, identity)
        own.come_by(line)
        return own
    if recalled is not None and recalled.admission.is_invited:
        own = OwnInvitation(directory, recalled.digest(), identity)
        if own.is_founders and recalled.admission.founder != identity.peer_id:
            raise _lost_key(own, recalled)
        own.directory_key = bytes.fromhex(recalled.admission.key)
        return own
    return None


def _lost_key(own: OwnInvitation, spec: RunSpec) -> UserError:
    return UserError(
        f"this home founded run {own.run_digest[:16]} as {spec.admission.founder}, and its "
        "identity is another one now, which nobody lets in",
        (
            "put identity.key back from a backup, or from the home that this is a copy of",
            "come back as a guest: p2p-dtfm --invite LINE, of a member that may invite",
            "or found the run anew, as another one: p2p-dtfm --run FILE --new",
        ),
        exit_code=5,
    )


def not_let_in(cause: str) -> UserError:
    """The error where members have answered and do not let this peer in."""
    return UserError(
        f"the members do not let this peer in: {cause}",
        (
            ASK_AGAIN,
            "then join with it: p2p-dtfm --invite LINE",
            "if this home was in that run: p2p-dtfm --run-digest DIGEST, without --initial-peers",
        ),
        exit_code=5,
    )
