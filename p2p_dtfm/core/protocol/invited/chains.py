"""What lets a peer into a run whose admission is by invitation: a chain of signatures.

    founder -> line -> peer -> line -> peer ...

A *line* is what one pastes: a key made for it, whose private half it holds. Who has the line signs,
with that key, that its own peer is meant. So what a peer shows names that peer, and is of no use to
whoever it was shown to; the line itself is shown to nobody. A peer whose line lets it invite signs
further lines with its own key, which live no longer than the one that it came by.

All links of a chain but those of its peers are signed by keys of whoever gave it: who may invite
could make one to any peer, and take back what that one never came by. So the peer itself has the
last word: it signs that it comes by these links.
"""

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign

LINK_KIND = "invitation"
ACCEPTANCE_KIND = "came by"
REVOCATION_KIND = "revocation"
CHAIN_LIMIT = 8
"""Links: the founder's guest, and three that were invited in turn."""
LINK_BYTES = 256
PEER_ID_CHARACTERS = 64
SKEW_S = 300
"""Clocks of people's machines differ by minutes."""
NOT_INVITED = "not invited"


class ChainLink(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Its signer lets `holder` in: a line, or the peer that has come by one."""

    run: bytes
    holder: str
    is_line: bool
    may_invite: bool
    expires_s: int
    """Unix time after which nobody comes in by this; of a line only."""


class Revocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Its signer takes back what it, or whom it has invited, has given to `holder`: a peer, which
    goes, or a line, by which those go that came by it."""

    run: bytes
    holder: str
    stays_for_guests: bool
    """Nobody new comes in by this line; who has come by it stays."""
    at_s: int


class Chain(msgspec.Struct, frozen=True):
    """Opened and checked, but for time and revocations."""

    holders: tuple[str, ...]
    """From the founder's first line to whom it is about."""
    expires_s: int
    """The soonest of all of its lines."""
    may_invite: bool

    @property
    def line(self) -> str:
        """By which its peer came."""
        return self.holders[-2]


def sign_link(link: ChainLink, signer_id: str, signer: Sign) -> Signed:
    """As its giver states it."""
    return sign(signer_id, LINK_KIND, encode(link), signer)


def run_mark(run_digest: str) -> bytes:
    """Which run a signature is about, in half of the bytes."""
    return bytes.fromhex(run_digest)[:16]


def bound_to(
    chain: tuple[Signed, ...], run_digest: str, peer_id: str, line_signer: Sign, signer: Sign
) -> tuple[Signed, ...]:
    """What the peer shows that has a line: `chain` ends in that, `line_signer` has its key, and
    `signer` the peer's own. Raises `PeerFault` if it is none."""
    last = decode(chain[-1].payload, ChainLink, LINK_BYTES)
    link = ChainLink(run_mark(run_digest), peer_id, False, last.may_invite, last.expires_s)
    return accepted((*chain, sign_link(link, last.holder, line_signer)), peer_id, signer)


def accepted(links: tuple[Signed, ...], peer_id: str, signer: Sign) -> tuple[Signed, ...]:
    """What the peer shows that these links lead to."""
    return (*links, sign(peer_id, ACCEPTANCE_KIND, _acceptance_of(links), signer))


def _acceptance_of(links: tuple[Signed, ...]) -> bytes:
    return encode(bytes.fromhex(digest_bytes(encode(links))))


def is_accepted(shown: tuple[Signed, ...]) -> bool:
    """Whether the last word is its peer's, as far as its kind says."""
    return bool(shown) and shown[-1].kind == ACCEPTANCE_KIND


def links_of(shown: tuple[Signed, ...]) -> tuple[Signed, ...]:
    """Without the peer's own word: what the chains of those begin with whom it invites."""
    return shown[:-1] if is_accepted(shown) else shown


def holders_of(shown: tuple[Signed, ...]) -> tuple[str, ...]:
    """Through whom it says that it leads, the last one being whom it is about. Raises `PeerFault`
    if it is no chain; who has signed it is not looked at."""
    links = links_of(shown)
    if not 0 < len(links) <= CHAIN_LIMIT or max(len(it.payload) for it in links) > LINK_BYTES:
        raise PeerFault(f"{NOT_INVITED}: the invitation cannot be")
    return tuple(decode(link.payload, ChainLink, LINK_BYTES).holder for link in links)


def holder_of(shown: tuple[Signed, ...]) -> str:
    """Whom a chain is about, by its own word. Raises `PeerFault` if it is none."""
    return holders_of(shown)[-1]


def size_of(signed: Signed) -> int:
    """About so many bytes as it travels."""
    return len(signed.payload) + len(signed.signature) + len(signed.peer_id) + len(signed.kind) + 16


def open_chain(
    chain: tuple[Signed, ...], founder: str, run_digest: str, holder: str, verify: Verify
) -> Chain:
    """What lets `holder` in, a peer or a line. Raises `PeerFault` with the reason in words."""
    if not 0 < len(chain) <= CHAIN_LIMIT:
        raise PeerFault(f"{NOT_INVITED}: the invitation has {len(chain)} signatures", holder)
    giver, may_give, holders, ends_s = founder, True, [], []
    for index, signed in enumerate(chain):
        link = _open_link(signed, giver, run_digest, verify)
        if link.is_line != (index % 2 == 0):
            raise PeerFault(f"{NOT_INVITED}: the invitation's links are out of order", holder)
        if link.is_line and not may_give:
            raise PeerFault(f"{NOT_INVITED}: {giver} may not invite others", holder)
        if not link.is_line and link.may_invite and not may_give:
            raise PeerFault(f"{NOT_INVITED}: {giver} gives a right that it has not", holder)
        if link.is_line:
            ends_s.append(link.expires_s)
        holders.append(link.holder)
        giver, may_give = link.holder, link.may_invite
    if giver != holder:
        raise PeerFault(f"{NOT_INVITED}: the invitation is somebody else's", holder)
    return Chain(tuple(holders), min(ends_s), may_give)


def open_shown(
    shown: tuple[Signed, ...], founder: str, run_digest: str, peer_id: str, verify: Verify
) -> Chain:
    """By what a peer has come, by its own word. Raises `PeerFault` with the reason in words."""
    links = links_of(shown)
    chain = open_chain(links, founder, run_digest, peer_id, verify)
    word = (shown[-1].peer_id, shown[-1].payload)
    if not is_accepted(shown) or word != (peer_id, _acceptance_of(links)):
        raise PeerFault(f"{NOT_INVITED}: its peer has not signed that it comes by it", peer_id)
    open_signed(shown[-1], ACCEPTANCE_KIND, bytes, verify)
    return chain


def _open_link(signed: Signed, giver: str, run_digest: str, verify: Verify) -> ChainLink:
    if len(signed.payload) > LINK_BYTES or signed.peer_id != giver:
        raise PeerFault(f"{NOT_INVITED}: the invitation is not from who may give it", giver)
    try:
        link = open_signed(signed, LINK_KIND, ChainLink, verify)
    except PeerFault as fault:
        raise PeerFault(f"{NOT_INVITED}: the invitation is forged ({fault.cause})") from fault
    if link.run != run_mark(run_digest):
        raise PeerFault(f"{NOT_INVITED}: the invitation is to another run")
    if len(link.holder) > PEER_ID_CHARACTERS or not 0 <= link.expires_s < 1 << 40:
        raise PeerFault(f"{NOT_INVITED}: the invitation cannot be")
    return link


def sign_revocation(revocation: Revocation, signer_id: str, signer: Sign) -> Signed:
    """As its giver states it."""
    return sign(signer_id, REVOCATION_KIND, encode(revocation), signer)


def open_revocation(signed: Signed, run_digest: str, verify: Verify) -> Revocation:
    """Raises `PeerFault`. Whether its signer may is seen from the chain of whom it is about."""
    if len(signed.payload) > LINK_BYTES:
        raise PeerFault("a revocation that is too long", signed.peer_id)
    revocation = open_signed(signed, REVOCATION_KIND, Revocation, verify)
    if revocation.run != run_mark(run_digest) or len(revocation.holder) > PEER_ID_CHARACTERS:
        raise PeerFault("a revocation in another run", signed.peer_id)
    return revocation
