"""The tensors at the edges of a stage, without which nobody can compute its work again.

Both ends of an edge claim the digest of each frame on it before the draw. The sender keeps what it
has sent until the step commits, so an auditor fetches what came into a stage from its neighbours.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from p2p_dtfm.core.messages.audit_messages import Boundary, Edges, Share
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES

FRAME_BYTES = 32
"""Of a digest; names a blob."""
KEPT_LIMIT_BYTES = 1 << 30
"""Of boundary tensors in main memory, at one stage in one step."""
NOTHING = Boundary(b"", b"", b"", b"")


class Beside(NamedTuple):
    """The peers before and after a stage in a pipeline; empty at its ends."""

    before: str
    after: str


def beside(plan: Plan, peer_id: str) -> dict[int, Beside]:
    """By microbatch of this peer's places; empty for a stage that is the whole model."""
    found: dict[int, Beside] = {}
    for number, position in plan.places_of(peer_id):
        pipeline = plan.pipelines[number]
        if len(pipeline.stages) == 1:
            continue
        peers = ["", *(stage.peer_id for stage in pipeline.stages), ""]
        neighbours = Beside(peers[position], peers[position + 2])
        found |= dict.fromkeys(pipeline.microbatches, neighbours)
    return found


def fault_of_edges(edges: Edges, plan: Plan, peer_id: str) -> str:
    """Why no correct peer states that; empty if it may."""
    due = beside(plan, peer_id)
    if edges.keys() != due.keys():
        return "a claim of other microbatches than go through its stage"
    for number, neighbours in due.items():
        edge = edges[number]
        before = (edge.activation_in, edge.gradient_out)
        after = (edge.activation_out, edge.gradient_in)
        for digests, peer in ((before, neighbours.before), (after, neighbours.after)):
            if any(len(digest) != (FRAME_BYTES if peer else 0) for digest in digests):
                return "a claim with a boundary's digest of another length"
    return ""


def unlike_boundaries(shares: Mapping[str, Share], plan: Plan) -> set[tuple[str, str]]:
    """(receiver, sender) where what has come is not what was sent."""
    return {
        (receiver, sender) for sender, receiver, sent, came in _frames(shares, plan) if sent != came
    }


def _frames(shares: Mapping[str, Share], plan: Plan) -> Iterator[tuple[str, str, bytes, bytes]]:
    for pipeline in plan.pipelines:
        for one, other in zip(pipeline.stages, pipeline.stages[1:], strict=False):
            first, second = one.peer_id, other.peer_id
            for number in pipeline.microbatches:
                low = shares[first].edges.get(number, NOTHING)
                high = shares[second].edges.get(number, NOTHING)
                yield first, second, low.activation_out, high.activation_in
                yield second, first, high.gradient_out, low.gradient_in


def boundary_bytes(spec: RunSpec) -> int:
    """Of one tensor as it is, before any codec."""
    return FLOAT_BYTES * spec.batch.microbatch * spec.model.context * spec.model.width


def kept_microbatches(boundary_bytes: int) -> int:
    """Of how many microbatches a stage between two others can keep all that it sends."""
    return KEPT_LIMIT_BYTES // (2 * boundary_bytes)


def inputs_are_kept(plan: Plan, peer_id: str, microbatches: int) -> bool:
    """Whether the neighbours of a stage keep all that they send, of so many each."""
    neighbours = {peer for it in beside(plan, peer_id).values() for peer in it if peer}
    return all(len(beside(plan, peer)) <= microbatches for peer in neighbours)
