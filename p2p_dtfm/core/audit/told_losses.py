"""The losses of a step, told before anybody knows whose work will be computed again.

When a peer claims, others have what the step needs of it, and claim what has come. But nobody needs
a loss. The last to claim knows the draw from the others' claims, and would state a false loss
wherever it is not drawn. So each holder of the head tells a digest of its losses on frames that it
sends anyway. It does so on all frames of its segment's reduction. As all who have the head may lie
together, it also does so on the last gradient for the stage before it. Who gets these frames claims
what it was told.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from p2p_dtfm.core.audit.boundaries import TRAINING, Due, states_held_out
from p2p_dtfm.core.messages.audit_messages import LOSSES_BYTES, Edges, Share
from p2p_dtfm.core.messages.prepared import Prepared
from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.schedule.one_order import merged


class LastGradient(NamedTuple):
    """The last gradient that a holder of the head sends back in a step; it tells of the losses."""

    microbatch: int
    before: str
    """The peer to which it goes; empty if the microbatch has no stage before the head."""


class Tellers(NamedTuple):
    """Who tells of its losses in a plan's steps, and on what."""

    heads: tuple[str, ...]
    """The holders of the head."""
    first_layer: int
    """First layer of the segment on whose reduction several heads tell one another."""
    last: Mapping[str, LastGradient]
    """By head, as several may lie together."""

    @property
    def is_one(self) -> bool:
        return len(self.heads) == 1

    def to(self, peer_id: str) -> tuple[str, ...]:
        """Who tells `peer_id` of its losses."""
        others = tuple(it for it in self.heads if it != peer_id)
        if peer_id in self.heads:
            return others
        return tuple(it for it in others if self.last[it].before == peer_id)


@lru_cache(maxsize=64)
def tellers(plan: Plan) -> Tellers:
    head = plan.pipelines[0].stages[-1].end_layer - 1
    first_layer = next(it.first_layer for it in plan.segments() if head in it.layers)
    heads, lists = plan.holders(head), [tuple(each.microbatches) for each in plan.pipelines]
    last = dict.fromkeys(heads, LastGradient(-1, ""))
    pipeline_of = {number: n for n, numbers in enumerate(lists) for number in numbers}
    for number in merged(plan, lists, {}):  # each head computes its own in this order
        *_, before, stage = (None, *plan.pipelines[pipeline_of[number]].stages)
        last[stage.peer_id] = LastGradient(number, before.peer_id if before is not None else "")
    return Tellers(heads, first_layer, last)


def losses_digest(loss_sum: float, held_out_loss_sum: float) -> bytes:
    text = encode([loss_sum.hex(), held_out_loss_sum.hex()])
    return bytes.fromhex(digest_bytes(text))[:LOSSES_BYTES]


def stated_losses(edges: Edges, loss_sum: float, held_out_loss_sum: float) -> bytes:
    """Digest of those losses that are part of a work: see `work.stated_work`."""
    return losses_digest(loss_sum, held_out_loss_sum if states_held_out(edges) else 0.0)


def fault_of_losses(share: Share, plan: Plan, peer_id: str, due: Due = TRAINING) -> str:
    """Why no correct peer claims to have told, and been told of, these losses; empty if one may."""
    known = tellers(plan)
    expected = {*known.to(peer_id), *(it for it in known.heads if it == peer_id)}
    if set(share.losses) != (expected if due.trains else set()):
        return "a claim of other losses than it makes and is told of"
    lengths = {len(digest) for it, digest in share.losses.items() if it != peer_id}
    if len(share.losses.get(peer_id, bytes(LOSSES_BYTES))) != LOSSES_BYTES:
        return "a claim with a digest of losses of another length"
    if not lengths <= {0, LOSSES_BYTES}:  # nothing, where the reduction takes no frame to it
        return "a claim with a digest of losses of another length"
    return ""


def unlike_losses(shares: Mapping[str, Share]) -> set[tuple[str, str]]:
    """(who was told, who told it) where the teller claims other losses than it told."""
    return {
        (peer_id, teller)
        for peer_id, share in shares.items()
        for teller, told in share.losses.items()
        if told and teller in shares and told != shares[teller].losses.get(teller)
    }


def other_losses(said: Mapping[str, Prepared]) -> dict[str, str]:
    """Peers whose signed Prepared states another loss than they claimed, as its account says."""
    found = {}
    for peer_id, prepared in said.items():
        if prepared.audit is None:
            continue
        losses, share = (prepared.loss_sum, prepared.held_out_loss_sum), prepared.audit.share
        claimed = share.losses.get(peer_id)
        if claimed is not None and claimed != stated_losses(share.edges, *losses):
            found[peer_id] = "states another loss than it has claimed"
    return found
