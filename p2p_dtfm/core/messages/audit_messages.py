"""What stage-holders of an audited run say of their work, before and in Prepared."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.protocol.canonical import Numbered, encode
from p2p_dtfm.core.protocol.signed import Verify, covered
from p2p_dtfm.core.protocol.snapshot import ViewId

Parts = Numbered[tuple[bytes, ...]]
"""By segment: a digest of each chunk of one peer's own gradient. Its bytes can be fetched under the
digest while the step is open. A segment with one holder has one chunk."""
Got = Numbered[tuple[tuple[bytes, ...], ...]]
"""By segment with other holders, for each of them: a digest of each chunk that came from it, empty
for a chunk that is not summed here. Nothing from the peer itself."""
SquaredNorms = Numbered[tuple[float, ...]]
"""By segment with other holders: the squared norm of each holder's sum, in their order."""


LOSSES_BYTES = 16
"""Length of a digest of the losses that a peer makes in a step."""
SIGNED_LIMIT_BYTES = 512
"""Bytes of a claim's text and signature, which have some 300."""
UNLIKE_LIMIT = 2
"""Peers whose second claims a Prepared tells: it must fit into a message."""
HEARD_LIMIT = 256
"""Claims in one account: audits are not for hundreds of stage-holders."""
AUDITS_LIMIT = 64
"""Audits that an account passes on: some 6 KiB."""
COULD_NOT = b""
"""The word of an auditor whose machine did not get through the work: neither for nor against."""


class Boundary(NamedTuple):
    """Digests of one microbatch's frames at the edges of a stage, as they lay on the line; empty
    where the pipeline ends."""

    activation_in: bytes
    activation_out: bytes
    gradient_in: bytes
    gradient_out: bytes


Edges = Numbered[Boundary]
"""By microbatch; nothing for a stage that is the whole model."""


class Share(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a peer states that it did in a step, besides sums and losses."""

    arithmetic: str
    """The name of the peer's arithmetic. Equal names compute equal bits; empty: no other machine is
    known to compute the same bits."""
    threads: int
    """Threads that computed it; sums within a kernel depend on their number."""
    parts: Parts
    got: Got
    edges: Edges = {}
    """What came from the neighbours in the pipelines, and what they were sent."""
    parameters: Numbered[bytes] = {}
    """By layer, where members hold unlike layers: a digest of the parameters with which the step
    began. They can be fetched under it while the step is open."""
    losses: dict[str, bytes] = {}
    """By peer with the head: a digest of its losses. The peer states its own, and those of others
    as they told it (`core.audit.told_losses`)."""
    norms: SquaredNorms = {}
    """Where members hold unlike layers: the norms of the sums as they came to the peer. The norm of
    its own sum is a part of its work. All norms of a segment, added up in order, are its squared
    norm."""


class Claimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="claimed"):
    """The sender's work of a step is done. The sender says what it was, before anybody knows whose
    work will be computed again."""

    view: ViewId
    step: int
    share: Share
    work: bytes
    """`core.audit.work.stated_work` of the share."""
    opening: bytes
    """What the claim of the step before, in this view, was committed to."""
    commitment: bytes
    """The digest of the next opening."""
    signature: bytes = b""
    """The signature of `claim_text`: a peer that claims two things has signed both."""


class Audited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="audited"):
    """The sender was drawn to compute a stage-holder's work of a step again."""

    view: ViewId
    step: int
    peer_id: str
    """Whose work."""
    work: bytes
    """What the sender comes to, or `COULD_NOT`."""
    signature: bytes = b""
    """The signature of `audit_text`: who says two things of one work has signed both."""


class HeardClaim(NamedTuple):
    """A claim in the form in which a peer that has heard it can prove it to others."""

    claim: bytes
    """`core.audit.work.claim_digest`"""
    signature: bytes
    """The signature of `claim_text` by the maker of the claim."""


class HeardAudit(NamedTuple):
    """What an auditor has said, in the form in which a peer that has heard it can prove it to
    others. Peers are named by their place among all stage-holders, in order of their ids."""

    by: int
    of: int
    """Whose work."""
    work: bytes
    signature: bytes
    """The signature of `audit_text` by the auditor."""


class ShownClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shown_claims"):
    """What the sender has heard of claims and audits, told once audits take long.

    A liar that opens one thing to some and another to others makes them draw unlike auditors, and
    wait for one another. An auditor that tells some one thing, and others another or nothing, makes
    them wait as well. `whole` holds claims themselves, for a receiver that says it lacks them."""

    view: ViewId
    step: int
    heard: dict[str, HeardClaim]
    audits: tuple[HeardAudit, ...] = ()
    whole: dict[str, Claimed] = {}


def claim_text(peer_id: str, view: ViewId, step: int, claim: bytes) -> bytes:
    """What the maker of a claim signs."""
    return covered(peer_id, "claim", encode([view.number, view.snapshot, step, claim]))


def is_claim_of(peer_id: str, view: ViewId, step: int, heard: HeardClaim, verify: Verify) -> bool:
    """Whether `peer_id` has signed the claim."""
    text = claim_text(peer_id, view, step, heard.claim)
    if len(text) + len(heard.signature) > SIGNED_LIMIT_BYTES:
        return False  # `_is_signed` must remember nothing long
    return _is_signed(peer_id, text, heard.signature, verify)


def audit_text(auditor: str, view: ViewId, step: int, peer_id: str, work: bytes) -> bytes:
    """What an auditor signs."""
    return covered(auditor, "audit", encode([view.number, view.snapshot, step, peer_id, work]))


def is_audit_by(
    auditor: str, view: ViewId, step: int, peer_id: str, said: HeardAudit, verify: Verify
) -> bool:
    """Whether `auditor` has signed what it said."""
    text = audit_text(auditor, view, step, peer_id, said.work)
    if len(text) + len(said.signature) > SIGNED_LIMIT_BYTES:
        return False
    return _is_signed(auditor, text, said.signature, verify)


def auditor_and_audited(said: HeardAudit, holders: Sequence[str]) -> tuple[str, str] | None:
    """The auditor and the peer whose work it audited. `holders` are in order of their ids; None
    where a place is beyond them."""
    if not (0 <= said.by < len(holders) and 0 <= said.of < len(holders)):
        return None
    return holders[said.by], holders[said.of]


@lru_cache(maxsize=512)
def _is_signed(peer_id: str, text: bytes, signature: bytes, verify: Verify) -> bool:
    """Whether a signature holds. It is remembered, since all peers pass on the same signatures."""
    return verify(peer_id, text, signature)


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """In a signed Prepared: what its maker has claimed, what it has heard others claim, and what
    it has found of their works."""

    share: Share
    heard: dict[str, HeardClaim]
    """The claims of all stage-holders."""
    found: dict[str, bytes]
    """By stage-holder whose work was drawn or disputed: what that work came to here. In its place
    stands `changed_work`, where the work was another one when the step was done before. Or
    `excused_by`, for a peer that says that something else came to it then. Or `SENT_OTHER`, for a
    peer that has sent the maker something else than it claims. For a peer that is gone since, and
    had claimed or sent what is not true, anything may stand here."""
    disputed: dict[str, bool] = {}
    """Peers against which an auditor has told the maker something: that the work is not what was
    claimed or sent, or was another before. The value: whether the maker found the same."""
    openings: bytes = b""
    """`core.audit.work.openings_digest`: what the maker has opened, and committed itself to."""
    unlike: dict[str, HeardClaim] = {}
    """Second claims of this step that the maker was shown, by peer. Together with `heard` they show
    that the peer has signed both."""
    audits: tuple[HeardAudit, ...] = ()
    """Some of what the maker has heard from drawn auditors. If an auditor has said two things of a
    work, both stand here."""
