"""What peers say to one another while they agree on a view."""

import msgspec

from p2p_dtfm.core.canonical import digest, encode_for_wire
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.snapshot import Member, ViewId

_CONTRIBUTION = "contribution"


class PresentView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The view that a contributor is active in."""

    view: ViewId
    members: tuple[Member, ...]
    plan: Plan | None


class Contribution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One peer's part of the snapshot, fixed when it enters Gather. Others relay it: signed."""

    member: Member
    number: int
    record: Signed
    present: PresentView | None
    step: int
    """Committed steps."""
    held: dict[int, int]
    """The layers whose state this peer has, with their versions."""
    joiners: tuple[Signed, ...]
    """Records of newcomers that asked this peer to be let in."""


class Gather(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gather"):
    """All that the sender knows for view `number`, and the digest of it."""

    sender: Member
    number: int
    planned: bool
    base: ViewId
    round: int
    contributions: tuple[Signed, ...]
    absent: tuple[Member, ...]
    digest: str


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The sender's knowledge for this view is frozen, and this is what it comes to."""

    sender: Member
    view: ViewId
    plan_digest: str


class Synced(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="synced"):
    """The sender holds, or follows, all state that its place in the view needs."""

    sender: Member
    view: ViewId


class Active(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="active"):
    """The sender has taken over: from `step` on, steps happen in this view."""

    sender: Member
    view: ViewId
    step: int


class JoinRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join_request"):
    """A measured newcomer asks to be let in at the next view."""

    record: Signed


AgreementMessage = Gather | Ready | Synced | Active | JoinRequest


def sign_contribution(contribution: Contribution, signer: Sign) -> Signed:
    return sign(contribution.member.peer_id, _CONTRIBUTION, encode_for_wire(contribution), signer)


def open_contribution(signed: Signed, verify: Verify) -> Contribution:
    """Raises `PeerFault` for a forgery or malformed contents."""
    return open_signed(signed, _CONTRIBUTION, Contribution, verify)


def knowledge_digest(number: int, contributions: dict[Member, Signed], absent: set[Member]) -> str:
    """Digest of what has been gathered: equal at all peers exactly when they know the same."""
    known = [(member, contributions[member].payload) for member in sorted(contributions)]
    return digest((number, known, sorted(absent)))
