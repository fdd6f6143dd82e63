"""What a stage-holder says when it has all of a step's reduced gradients, and under its name."""

from typing import NamedTuple

import msgspec

from p2p_dtfm.core.canonical import encode_for_wire
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.signed import Sign, Signed, Verify, open_signed, sign
from p2p_dtfm.core.snapshot import ViewId

_KIND = "prepared"


class Prepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A stage-holder has the reduced gradient of all its segments for this step.

    `squared_norms` maps a segment's number to the squared L2 norm of its reduced gradient. Sums of
    losses are in nats and come from the stage with the head, 0 elsewhere. `ready_for` names the
    next view if, as far as the sender knows, all its members are caught up.
    """

    view: ViewId
    step: int
    peer_id: str
    squared_norms: dict[int, float]
    loss_sum: float
    token_count: int
    held_out_loss_sum: float
    held_out_token_count: int
    ready_for: ViewId | None
    base: str = ""
    """Lineage digest of the states that the step starts from."""
    sums: dict[int, tuple[bytes, ...]] = {}
    """By segment with other holders: of the bytes of all sums that each holder has made, in the
    order of the holders, a digest; empty for a holder that makes none."""
    states: dict[int, bytes] = {}
    """By layer, a digest of the state that the step starts from; in some steps only."""


class SignedPrepared(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="prepared"):
    """A Prepared on its way: others may pass it on, and two that differ are evidence."""

    signed: Signed


class Statement(NamedTuple):
    """A Prepared whose signature holds, and what proves to others that it was said."""

    prepared: Prepared
    signed: Signed


def sign_prepared(prepared: Prepared, signer: Sign) -> Signed:
    """Its bytes are never made anew by others, so floats may be in them."""
    return sign(prepared.peer_id, _KIND, encode_for_wire(prepared), signer)


def open_prepared(signed: Signed, verify: Verify) -> Prepared:
    """Raises `PeerFault` for a forgery, malformed contents, or words put in another's mouth."""
    prepared = open_signed(signed, _KIND, Prepared, verify)
    if prepared.peer_id != signed.peer_id:
        raise PeerFault("says Prepared for another peer", signed.peer_id)
    return prepared
