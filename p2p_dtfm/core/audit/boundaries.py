"""The tensors at the edges of a stage, without which nobody can compute its work again.

Both ends of an edge claim the digest of each frame on it before the draw. The sender keeps what it
has sent until the step commits, so an auditor fetches what came into a stage from its neighbours.
The same goes for held-out microbatches, which go there and not back.
"""

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple

from p2p_dtfm.core.messages.audit_messages import Boundary, Edges, Share
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.audit_spec import MICROBATCHES_LIMIT
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES

FRAME_BYTES = 32
"""Length of a frame's digest, which names a blob."""
KEPT_LIMIT_BYTES = 1 << 30
"""Boundary tensors that one stage keeps in main memory in one step."""
NOTHING = Boundary(b"", b"", b"", b"")


class Due(NamedTuple):
    """What is claimed of a step."""

    trains: bool = True
    """Gradients are claimed; after the last step there are none."""
    held_out: int = 0
    """How many held-out microbatches go between the stages of pipelines."""


TRAINING = Due()


class Beside(NamedTuple):
    """The peers before and after a stage in a pipeline; empty at its ends."""

    before: str
    after: str


def held_out_through(plan: Plan, pipeline: int, first: int, count: int) -> range:
    """Which of `count` held-out microbatches, numbered from `first` on, go through a pipeline: the
    pipelines get them in turn."""
    return range(first + pipeline, first + count, len(plan.pipelines))


def _numbers(plan: Plan, pipeline: int, due: Due) -> list[int]:
    """Numbers of a pipeline's microbatches in a step. Held-out ones come after all that train."""
    last = plan.pipelines[-1].microbatches.stop
    trained = plan.pipelines[pipeline].microbatches if due.trains else ()
    return [*trained, *held_out_through(plan, pipeline, last, due.held_out)]


def beside(plan: Plan, peer_id: str, due: Due = TRAINING) -> dict[int, Beside]:
    """The peer's neighbours, by microbatch; empty for a stage that is the whole model."""
    found: dict[int, Beside] = {}
    for number, position in plan.places_of(peer_id):
        pipeline = plan.pipelines[number]
        if len(pipeline.stages) == 1:
            continue
        peers = ["", *(stage.peer_id for stage in pipeline.stages), ""]
        neighbours = Beside(peers[position], peers[position + 2])
        found |= dict.fromkeys(_numbers(plan, number, due), neighbours)
    return found


def fault_of_edges(edges: Edges, plan: Plan, peer_id: str, due: Due = TRAINING) -> str:
    """Why no correct peer states these edges; empty if one may."""
    places = beside(plan, peer_id, due)
    if edges.keys() != places.keys():
        return "a claim of other microbatches than go through its stage"
    held_out_from = plan.pipelines[-1].microbatches.stop
    for number, (before, after) in places.items():
        edge, comes_back = edges[number], number < held_out_from
        lengths = (
            (edge.activation_in, bool(before)),
            (edge.activation_out, bool(after)),
            (edge.gradient_in, bool(after) and comes_back),
            (edge.gradient_out, bool(before) and comes_back),
        )
        if any(len(digest) != FRAME_BYTES * is_there for digest, is_there in lengths):
            return "a claim with a boundary's digest of another length"
    return ""


def states_held_out(edges: Edges) -> bool:
    """Whether a stage's evaluation is part of its work: the stage is the whole model, or claims
    frames of held-out microbatches."""
    return not edges or any(not (it.gradient_in or it.gradient_out) for it in edges.values())


def unlike_boundaries(
    shares: Mapping[str, Share], plan: Plan, due: Due = TRAINING
) -> set[tuple[str, str]]:
    """(receiver, sender) where what came is not what was sent."""
    frames = _frames(shares, plan, due)
    return {(receiver, sender) for sender, receiver, sent, came in frames if sent != came}


def other_frames(
    then: Mapping[str, Share], now: Mapping[str, Share], plan: Plan, due: Due = TRAINING
) -> set[tuple[str, str]]:
    """(receiver, sender) of a step that is done again, where the two contradict each other. The
    receiver says that another frame came now than then; the sender, that it sent the same."""
    both = zip(_frames(then, plan, due), _frames(now, plan, due), strict=True)
    return {
        (receiver, sender)
        for (sender, receiver, sent, came), (_, _, sent_now, came_now) in both
        if sent == sent_now != b"" and b"" != came != came_now
    }


def _frames(
    shares: Mapping[str, Share], plan: Plan, due: Due
) -> Iterator[tuple[str, str, bytes, bytes]]:
    """(sender, receiver, digest as sent, digest as it came) of each frame. Digests of a peer that
    has not claimed are empty."""

    def at(peer_id: str, number: int) -> Boundary:
        share = shares.get(peer_id)
        return NOTHING if share is None else share.edges.get(number, NOTHING)

    for place, pipeline in enumerate(plan.pipelines):
        numbers = _numbers(plan, place, due)
        for one, other in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            first, second = one.peer_id, other.peer_id
            for number in numbers:
                low, high = at(first, number), at(second, number)
                yield first, second, low.activation_out, high.activation_in
                yield second, first, high.gradient_out, low.gradient_in


def boundary_bytes(spec: RunSpec) -> int:
    """The size of one boundary tensor, before any codec."""
    return FLOAT_BYTES * math.prod(spec.boundary_shape(1))


def kept_microbatches(boundary_bytes: int) -> int:
    """For how many microbatches a stage between two others can keep all that it sends."""
    return KEPT_LIMIT_BYTES // (2 * boundary_bytes)


def inputs_are_kept(plan: Plan, peer_id: str, microbatches: int) -> bool:
    """Whether a stage's neighbours keep all that they send, if each can for `microbatches`."""
    if plan.microbatch_count <= microbatches:
        return True
    neighbours = {peer for it in beside(plan, peer_id).values() for peer in it if peer}
    return all(len(beside(plan, peer)) <= microbatches for peer in neighbours)


@lru_cache(maxsize=64)
def held_out_is_kept(plan: Plan, due: Due, microbatches: int) -> bool:
    """Whether every stage can keep what it sends in a step that evaluates, and state all of it
    (see `inputs_are_kept`). A held-out microbatch is one tensor, where others are two."""
    for peer_id in plan.stage_holders():
        trained = len(beside(plan, peer_id, due._replace(held_out=0)))
        held_out = len(beside(plan, peer_id, due)) - trained
        if 2 * trained + held_out > 2 * microbatches or trained + held_out > MICROBATCHES_LIMIT:
            return False
    return True
