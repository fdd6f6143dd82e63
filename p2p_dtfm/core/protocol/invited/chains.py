"""The chain of signatures that lets a peer into a run whose admission is by invitation.

    founder -> line -> peer -> line -> peer ...

A *line* is the text that a person pastes. It holds the private half of a key made for it. With that
key, whoever has the line signs which peer comes by it. So what a peer shows names that peer, and is
of no use to those who see it; the line itself is shown to nobody. A peer whose line lets it invite
signs further lines with its own key. They live no longer than the line by which it came.

The giver of a line has all keys that a chain to any peer needs. So it could make a chain to a peer
that never came by it, and then take that chain back. Therefore the peer itself has the last word:
it signs that it comes by these links.
"""

import msgspec

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign

LINK_KIND = "invitation"
ACCEPTANCE_KIND = "came by"
REVOCATION_KIND = "revocation"
CHAIN_LIMIT = 8
"""Links in a chain: to the founder's guest, and to three peers that were invited in turn."""
LINK_BYTES = 256
PEER_ID_CHARACTERS = 64
SKEW_S = 300
"""Clocks of people's machines differ by minutes."""
NOT_INVITED = "not invited"


class ChainLink(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signer lets `holder` in, which is a line, or the peer that has come by one."""

    run: bytes
    holder: str
    is_line: bool
    may_invite: bool
    expires_s: int
    """Unix time after which nobody comes in by this; it counts for a line only."""


class Revocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The signer takes back what it, or a peer that it invited, has given to `holder`. A peer that
    is named must go. If a line is named, those that came by it must go."""

    run: bytes
    holder: str
    stays_for_guests: bool
    """Nobody new comes in by this line, but peers that have come by it stay."""
    at_s: int


class Chain(msgspec.Struct, frozen=True):
    """A chain that was opened and checked, except for time and revocations."""

    holders: tuple[str, ...]
    """From the founder's first line to the peer or line that the chain is about."""
    expires_s: int
    """When the first of its lines expires."""
    may_invite: bool

    @property
    def line(self) -> str:
        """The line by which the chain's peer came."""
        return self.holders[-2]


def sign_link(link: ChainLink, signer_id: str, signer: Sign) -> Signed:
    """The link as its giver states it."""
    return sign(signer_id, LINK_KIND, encode(link), signer)


def run_mark(run_digest: str) -> bytes:
    """The first half of a run's digest, which names the run in a signature."""
    return bytes.fromhex(run_digest)[:16]


def bound_to(
    chain: tuple[Signed, ...], run_digest: str, peer_id: str, line_signer: Sign, signer: Sign
) -> tuple[Signed, ...]:
    """What a peer with a line shows. `chain` ends in the line, `line_signer` signs with the line's
    key, and `signer` with the peer's own. Raises `PeerFault` if the last link cannot be read."""
    last = decode(chain[-1].payload, ChainLink, LINK_BYTES)
    link = ChainLink(run_mark(run_digest), peer_id, False, last.may_invite, last.expires_s)
    return accepted((*chain, sign_link(link, last.holder, line_signer)), peer_id, signer)


def accepted(links: tuple[Signed, ...], peer_id: str, signer: Sign) -> tuple[Signed, ...]:
    """What the peer to which these links lead shows: the links, and its own signature."""
    return (*links, sign(peer_id, ACCEPTANCE_KIND, _acceptance_of(links), signer))


def _acceptance_of(links: tuple[Signed, ...]) -> bytes:
    return encode(bytes.fromhex(digest_bytes(encode(links))))


def is_accepted(shown: tuple[Signed, ...]) -> bool:
    """Whether the last statement is of the kind by which a peer accepts its links."""
    return bool(shown) and shown[-1].kind == ACCEPTANCE_KIND


def links_of(shown: tuple[Signed, ...]) -> tuple[Signed, ...]:
    """The links without the peer's own word. The chains of the peers that it invites begin so."""
    return shown[:-1] if is_accepted(shown) else shown


def holders_of(shown: tuple[Signed, ...]) -> tuple[str, ...]:
    """The holders that a chain names; the last one is the peer that the chain is about. Raises
    `PeerFault` if it is no chain. Signatures are not checked."""
    links = links_of(shown)
    if not 0 < len(links) <= CHAIN_LIMIT or max(len(it.payload) for it in links) > LINK_BYTES:
        raise PeerFault(f"{NOT_INVITED}: the invitation cannot be")
    return tuple(decode(link.payload, ChainLink, LINK_BYTES).holder for link in links)


def holder_of(shown: tuple[Signed, ...]) -> str:
    """The peer that a chain says it is about. Raises `PeerFault` if it is no chain."""
    return holders_of(shown)[-1]


def size_of(signed: Signed) -> int:
    """About how many bytes a statement takes as it travels."""
    return len(signed.payload) + len(signed.signature) + len(signed.peer_id) + len(signed.kind) + 16


def open_chain(
    chain: tuple[Signed, ...], founder: str, run_digest: str, holder: str, verify: Verify
) -> Chain:
    """Checks the chain that lets `holder` in, a peer or a line. Raises `PeerFault` with the reason
    in words."""
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
    """Checks the chain by which a peer shows it has come, with its own signature. Raises
    `PeerFault` with the reason in words."""
    links = links_of(shown)
    chain = open_chain(links, founder, run_digest, peer_id, verify)
    if len(links) % 2:  # all that were given the line have its key: it names nobody
        raise PeerFault(f"{NOT_INVITED}: the invitation names a line, and no peer", peer_id)
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
    """The revocation as its giver states it."""
    return sign(signer_id, REVOCATION_KIND, encode(revocation), signer)


def open_revocation(signed: Signed, run_digest: str, verify: Verify) -> Revocation:
    """Opens a revocation. Raises `PeerFault`. Whether the signer may revoke is not checked here: it
    follows from the chain of the revoked peer or line."""
    if len(signed.payload) > LINK_BYTES:
        raise PeerFault("a revocation that is too long", signed.peer_id)
    revocation = open_signed(signed, REVOCATION_KIND, Revocation, verify)
    if revocation.run != run_mark(run_digest) or len(revocation.holder) > PEER_ID_CHARACTERS:
        raise PeerFault("a revocation in another run", signed.peer_id)
    return revocation
