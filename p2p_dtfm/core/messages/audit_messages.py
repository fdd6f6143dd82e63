"""What stage-holders of an audited run say of their work, before and in Prepared."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.protocol.canonical import Numbered, encode
from p2p_dtfm.core.protocol.signed import Verify, covered
from p2p_dtfm.core.protocol.snapshot import ViewId

Parts = Numbered[tuple[bytes, ...]]
"""By segment: of one peer's own gradient, a digest of each chunk, under which its bytes can be
fetched while the step is open. A segment with one holder has one."""
Got = Numbered[tuple[tuple[bytes, ...], ...]]
"""By segment with other holders, for each of them: a digest of what came from it of each chunk,
empty for one that is not summed here. Nothing from the peer itself."""
SquaredNorms = Numbered[tuple[float, ...]]
"""By segment with other holders: of what each of them has summed of it, in their order."""


LOSSES_BYTES = 16
"""Of a digest of the losses that a peer makes in a step."""
SIGNED_LIMIT_BYTES = 512
"""Of a claim's text and signature, which have some 300."""
UNLIKE_LIMIT = 2
"""Of those whose second claims a Prepared tells: it must fit into a message."""
HEARD_LIMIT = 256
"""Claims in one account: audits are not for hundreds of stage-holders."""
AUDITS_LIMIT = 64
"""Of what auditors have said an account passes on so much: some 6 KiB."""
COULD_NOT = b""
"""Of an auditor whose machine did not get through the work: no word for it or against it."""


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
    """What has the same name computes the same bits; empty: nobody's are known to be these."""
    threads: int
    """By which it was computed; sums within a kernel depend on it."""
    parts: Parts
    got: Got
    edges: Edges = {}
    """What came from the neighbours in the pipelines, and what they were sent."""
    parameters: Numbered[bytes] = {}
    """By layer, where members hold unlike ones: a digest of those with which the step began, under
    which they can be fetched while it is open."""
    losses: dict[str, bytes] = {}
    """By who has the head: a digest of its losses, of the peer itself as it states them, of others
    as they told it (`core.audit.told_losses`)."""
    norms: SquaredNorms = {}
    """Where members hold unlike layers: as the sums have come to the peer. That of its own is a
    part of its work, and all of a segment's, added up in order, are its squared norm."""


class Claimed(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="claimed"):
    """The sender's work of a step is done, and what it was is said here, before anybody knows
    whose work will be computed again."""

    view: ViewId
    step: int
    share: Share
    work: bytes
    """`core.audit.work.stated_work` of it."""
    opening: bytes
    """What the claim of the step before was committed to, in this view."""
    commitment: bytes
    """The digest of the next opening."""
    signature: bytes = b""
    """Of `claim_text`: who claims two things has signed both."""


class Audited(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="audited"):
    """The sender was drawn to compute a stage-holder's work of a step again."""

    view: ViewId
    step: int
    peer_id: str
    """Whose work."""
    work: bytes
    """What the sender comes to, or `COULD_NOT`."""
    signature: bytes = b""
    """Of `audit_text`: who says two things of one work has signed both."""


class HeardClaim(NamedTuple):
    """A claim, as whoever has heard it can prove it to others."""

    claim: bytes
    """`core.audit.work.claim_digest`"""
    signature: bytes
    """By the maker of the claim, of `claim_text`."""


class HeardAudit(NamedTuple):
    """What an auditor has said, as whoever has heard it can prove it to others. Peers are told by
    their place among all stage-holders, in order of their ids."""

    by: int
    of: int
    """Whose work."""
    work: bytes
    signature: bytes
    """By the auditor, of `audit_text`."""


class ShownClaims(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="shown_claims"):
    """What the sender has heard claimed, once audits take long: whoever opens one thing to some and
    another to others has them draw unlike auditors, and wait for one another. And what it has heard
    of audits: who tells some one thing and others another, or nothing, has them wait as well. And
    claims themselves, to one that says it lacks them."""

    view: ViewId
    step: int
    heard: dict[str, HeardClaim]
    audits: tuple[HeardAudit, ...] = ()
    whole: dict[str, Claimed] = {}


def claim_text(peer_id: str, view: ViewId, step: int, claim: bytes) -> bytes:
    """What the maker of a claim signs."""
    return covered(peer_id, "claim", encode([view.number, view.snapshot, step, claim]))


def is_claim_of(peer_id: str, view: ViewId, step: int, heard: HeardClaim, verify: Verify) -> bool:
    """Whether its maker has signed it."""
    text = claim_text(peer_id, view, step, heard.claim)
    if len(text) + len(heard.signature) > SIGNED_LIMIT_BYTES:
        return False  # nothing long is remembered
    return _is_signed(peer_id, text, heard.signature, verify)


def audit_text(auditor: str, view: ViewId, step: int, peer_id: str, work: bytes) -> bytes:
    """What an auditor signs."""
    return covered(auditor, "audit", encode([view.number, view.snapshot, step, peer_id, work]))


def is_audit_by(
    auditor: str, view: ViewId, step: int, peer_id: str, said: HeardAudit, verify: Verify
) -> bool:
    """Whether it has signed it."""
    text = audit_text(auditor, view, step, peer_id, said.work)
    if len(text) + len(said.signature) > SIGNED_LIMIT_BYTES:
        return False
    return _is_signed(auditor, text, said.signature, verify)


def auditor_and_audited(said: HeardAudit, holders: Sequence[str]) -> tuple[str, str] | None:
    """`holders` in order; None: there are no such."""
    if not (0 <= said.by < len(holders) and 0 <= said.of < len(holders)):
        return None
    return holders[said.by], holders[said.of]


@lru_cache(maxsize=512)
def _is_signed(peer_id: str, text: bytes, signature: bytes, verify: Verify) -> bool:
    """Remembered, since all pass on the same ones."""
    return verify(peer_id, text, signature)


class Account(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """In a signed Prepared: what its maker has claimed, what it has heard others claim, and what
    it has found of their works."""

    share: Share
    heard: dict[str, HeardClaim]
    """The claims of all stage-holders."""
    found: dict[str, bytes]
    """What the works of others, that were drawn or disputed, came to here; or `changed_work`, where
    it was another one when the step was done before; or `excused_by`, of who says that something
    else came to it then; or `SENT_OTHER`, of who has sent its maker
    something else than it claims; or anything of who is gone since, and had
    claimed or sent what is not so."""
    disputed: dict[str, bool] = {}
    """Of whom an auditor has told the maker that the work is not what was claimed, or that it was
    another before, or is not what was sent; and whether what was found here says so as well."""
    openings: bytes = b""
    """`core.audit.work.openings_digest`: what it has opened, and committed itself to."""
    unlike: dict[str, HeardClaim] = {}
    """Whose second claim of this step it was shown: with what it has heard, both are signed."""
    audits: tuple[HeardAudit, ...] = ()
    """What it has heard from those that were drawn: of many some. Of one that has said two things
    of a work both."""
