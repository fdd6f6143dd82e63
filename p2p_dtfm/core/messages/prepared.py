"""The Prepared that a stage-holder signs when it has all of a step's reduced gradients."""

from itertools import compress
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.messages.audit_messages import (
    AUDITS_LIMIT,
    HEARD_LIMIT,
    UNLIKE_LIMIT,
    Account,
    auditor_and_audited,
    is_audit_by,
    is_claim_of,
)
from p2p_dtfm.core.messages.room import fitting, order_from
from p2p_dtfm.core.protocol.canonical import Numbered, digest_bytes, encode, encode_for_wire
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.lineage import NAME_LIMIT
from p2p_dtfm.core.protocol.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.protocol.snapshot import ViewId

_KIND = "prepared"
ACCOUNT_LIMIT_BYTES = 64 * 1024
"""Bytes of one Prepared, which others pass on after a failure. In a run with audits it states what
its maker has claimed (`sections.audit_spec.MICROBATCHES_LIMIT`)."""
STEPS_AHEAD_LIMIT = 2
"""A peer that commits first may be one step ahead; two allow for one message overtaking another."""
SIGNED_BYTES = 160
"""Bytes around the payload of a Prepared that is passed on."""


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A stage-holder has the reduced gradient of all its segments for this step.

    `squared_norms` maps a segment's number to the squared L2 norm of its reduced gradient. Sums of
    losses are in nats and come from the stage with the head, 0 elsewhere. `ready_for` names the
    next view if, as far as the sender knows, all its members are caught up.
    """

    view: ViewId
    step: int
    peer_id: str
    squared_norms: Numbered[float]
    loss_sum: float
    token_count: int
    held_out_loss_sum: float
    held_out_token_count: int
    ready_for: ViewId | None
    base: str = ""
    """Lineage digest of the states that the step starts from."""
    sums: Numbered[tuple[bytes, ...]] = {}
    """By segment with other holders: for each holder, in their order, a digest of the bytes of all
    sums that it has made; empty for a holder that makes none."""
    states: Numbered[bytes] = {}
    """By layer, a digest of the state that the step starts from; in some steps only."""
    kept: int = -1
    """The newest cut of which the sender's part is kept elsewhere; -1 for none
    (`core.cost_model.cuts`). Where guardians keep up, it is the step itself, if they have that of
    all layers that the sender alone holds."""
    audit: Account | None = None
    """The sender's account of its work, in a run whose spec asks for audits."""
    tied: Numbered[bytes] = {}
    """Where both ends hold one matrix and lie with two peers: by end, a digest of the bytes of that
    end's sum of it, as made here or got from the other end."""


class SignedPrepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepared"):
    """A Prepared on its way: others may pass it on, and two that differ are evidence."""

    signed: Signed


class PreparedSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepared_steps"):
    """What a view's only stage-holder has said since it last told the others, in order."""

    signed: tuple[Signed, ...]


class Statement(NamedTuple):
    """A Prepared whose signature holds, and the signed bytes that prove it to others."""

    prepared: Prepared
    signed: Signed


def sign_prepared(prepared: Prepared, signer: Sign) -> Signed:
    """The Prepared as its maker signs it. Nobody else encodes its bytes again, so floats may be in
    them."""
    return sign(prepared.peer_id, _KIND, encode_for_wire(prepared), signer)


def open_prepared(signed: Signed, verify: Verify) -> Prepared:
    """Opens a signed Prepared.

    Raises `PeerFault` for a forgery, malformed contents, or words put in another peer's mouth. That
    also goes for words that the maker says it has heard. Raises it, too, for a Prepared that is too
    long to be passed on."""
    if len(signed.payload) > ACCOUNT_LIMIT_BYTES:
        raise PeerFault(f"says Prepared of {len(signed.payload)} bytes", signed.peer_id)
    prepared = open_signed(signed, _KIND, Prepared, verify)
    if prepared.peer_id != signed.peer_id:
        raise PeerFault("says Prepared for another peer", signed.peer_id)
    if len(prepared.base) > NAME_LIMIT:
        raise PeerFault("says Prepared from a lineage with no such name", signed.peer_id)
    if prepared.audit is not None:
        _require_heard(prepared, prepared.audit, verify)
    return prepared


def _require_heard(prepared: Prepared, account: Account, verify: Verify) -> None:
    if len(account.heard) > HEARD_LIMIT:  # looking at each takes time
        raise PeerFault(f"has heard {len(account.heard)} claims", prepared.peer_id)
    if len(account.unlike) > UNLIKE_LIMIT:
        raise PeerFault(f"was shown {len(account.unlike)} second claims", prepared.peer_id)
    for peer_id, heard in (*account.heard.items(), *account.unlike.items()):
        if not is_claim_of(peer_id, prepared.view, prepared.step, heard, verify):
            raise PeerFault(f"has heard what {peer_id} has not signed", prepared.peer_id)
    if len(account.audits) > AUDITS_LIMIT:
        raise PeerFault(f"has heard {len(account.audits)} audits", prepared.peer_id)
    holders = sorted(account.heard)
    for audit in account.audits:
        named = auditor_and_audited(audit, holders)
        if named is None:
            raise PeerFault("has heard audits of peers without a stage", prepared.peer_id)
        if not is_audit_by(named[0], prepared.view, prepared.step, named[1], audit, verify):
            raise PeerFault(f"has heard what {named[0]} has not signed", prepared.peer_id)


def with_room(
    passed_on: tuple[Signed, ...], limit_bytes: int, me: str | None = None
) -> tuple[Signed, ...]:
    """As many of these Prepared as fit into `limit_bytes`: the shortest, if `me` is None.

    Where all members pass on the same ones, `me` gives the order (`order_from`), so that each is
    passed on by somebody."""
    sizes = [len(signed.payload) + SIGNED_BYTES for signed in passed_on]
    order = order_from([it.peer_id for it in passed_on], sizes, me) if me is not None else None
    return tuple(compress(passed_on, fitting(sizes, limit_bytes, order)))


class StepOutcome(msgspec.Struct, frozen=True):
    """What all members know of a committed step, equal at all of them."""

    step: int
    gradient_norm: float
    loss: float | None
    """Mean nats per token over the global batch, before the update; None where nothing was
    trained, as after the last step."""
    token_count: int
    held_out_loss: float | None
    """The loss of the parameters before the update."""
    take_over: ViewId | None
    """The view in which the next step happens, if the view changes."""
    kept: int = -1
    """Step of the newest cut that all stage-holders have kept, or this step itself; -1 for none."""

    @property
    def digest(self) -> str:
        """The digest of every bit: a peer that has applied another outcome has other states."""
        return digest_bytes(encode(self))
