"""The step as a transaction: it commits when every stage-holder has said Prepared.

Every peer that sees the same Prepared messages computes the same outcome, bit for bit: sums run in
a fixed order, and where several holders state a segment's norm the lowest peer id counts.
"""

import math
from typing import NamedTuple

import msgspec

from p2p_dtfm.core.canonical import encode_for_wire
from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.plan import Plan
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


class StepOutcome(msgspec.Struct, frozen=True):
    """What all members know of a committed step alike."""

    step: int
    gradient_norm: float
    loss: float | None
    """Mean nats per token over the global batch, before the update; None where nothing was
    trained, as after the last step."""
    token_count: int
    held_out_loss: float | None
    """Of the parameters before the update."""
    take_over: ViewId | None
    """The view in which the next step happens, if it is another one."""


class StepTransaction:
    """Collects Prepared for one step of one view."""

    def __init__(self, view: ViewId, step: int, plan: Plan) -> None:
        self.view = view
        self.step = step
        self._holders = plan.stage_holders()
        self._segments = plan.segments()
        self._prepared: dict[str, Prepared] = {}
        self._signed: dict[str, Signed] = {}

    def record(self, statement: Statement) -> None:
        """Take a Prepared of this view and step. Raises `PeerFault` if it cannot be true."""
        prepared = statement.prepared
        assert (prepared.view, prepared.step) == (self.view, self.step)
        sender = prepared.peer_id
        if sender not in self._holders:
            raise PeerFault("Prepared from a peer without a stage", sender)
        held = self._prepared.get(sender)
        if held is not None and held != prepared:
            raise PeerFault(f"two different Prepared for step {self.step}", sender)
        due = {n for n, segment in enumerate(self._segments) if sender in segment.holders}
        if set(prepared.squared_norms) != due:
            raise PeerFault("Prepared does not state the norms of its segments", sender)
        numbers = [*prepared.squared_norms.values(), prepared.loss_sum, prepared.held_out_loss_sum]
        if not all(math.isfinite(number) for number in numbers):
            raise PeerFault(
                f"Prepared for step {self.step} with a number that is not finite", sender
            )
        counts = (prepared.token_count, prepared.held_out_token_count)
        if min(*counts, *prepared.squared_norms.values()) < 0:
            raise PeerFault("Prepared with a negative count or squared norm", sender)
        self._prepared[sender] = prepared
        self._signed[sender] = statement.signed

    @property
    def missing(self) -> tuple[str, ...]:
        """Stage-holders that have not said Prepared."""
        return tuple(holder for holder in self._holders if holder not in self._prepared)

    @property
    def signed(self) -> tuple[Signed, ...]:
        """All that were taken, in the order of the holders."""
        return tuple(self._signed[item] for item in self._holders if item in self._signed)

    def outcome(self) -> StepOutcome | None:
        """The commit, or None while a Prepared is missing."""
        if self.missing:
            return None
        prepared = [self._prepared[holder] for holder in self._holders]
        squared_norm = sum(
            self._prepared[min(segment.holders)].squared_norms[number]
            for number, segment in enumerate(self._segments)
        )
        token_count = sum(item.token_count for item in prepared)
        held_out_tokens = sum(item.held_out_token_count for item in prepared)
        ready_for = {item.ready_for for item in prepared}
        return StepOutcome(
            step=self.step,
            gradient_norm=math.sqrt(squared_norm),
            loss=sum(item.loss_sum for item in prepared) / token_count if token_count else None,
            token_count=token_count,
            held_out_loss=sum(item.held_out_loss_sum for item in prepared) / held_out_tokens
            if held_out_tokens
            else None,
            take_over=ready_for.pop() if len(ready_for) == 1 else None,
        )
