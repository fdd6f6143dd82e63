"""A head that is the token embedding: which holders of the two ends give each other their sums.

Both layers keep a copy of the one matrix. Each end is reduced among its own holders first. Then, in
each pipeline whose ends lie with two peers, the first gives the last the embedding's sum, and the
last gives the first the head's. All holders of an end have the same sum, and two numbers add up to
the same bits in either order. So every copy gets the same gradient, and no pipeline waits for
another.
"""

from collections.abc import Collection
from itertools import pairwise

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.pieces import CHUNK_ELEMENTS


def tied_ends(spec: RunSpec) -> tuple[int, ...]:
    """The embedding and the head, if they share their matrix, and it is trained."""
    is_trained = spec.model.tied_head and not spec.trains_adapters
    return (0, spec.model.layers + 1) if is_trained else ()


def tied_chunks(spec: RunSpec) -> tuple[tuple[int, int], ...]:
    """The parts in which the matrix travels: first element and end of each."""
    count = spec.model.vocabulary * spec.model.width
    return tuple(pairwise([*range(0, count, CHUNK_ELEMENTS), count]))


def other_end(plan: Plan, me: str) -> tuple[int, str] | None:
    """The end whose sum `me` lacks, and the peer that gives it, at the far end of the pipeline.
    None where `me` holds both ends or neither."""
    place = plan.place_of(me)
    if place is None:
        return None
    number, position = place
    stages = plan.pipelines[number].stages
    if len(stages) == 1 or 0 < position < len(stages) - 1:
        return None
    if position == 0:
        return stages[-1].end_layer - 1, stages[-1].peer_id
    return 0, stages[0].peer_id


def states_ends(plan: Plan, peer_id: str, ends: Collection[int]) -> bool:
    """Whether a peer states both ends' sums of the matrix. It does if it holds an end, and some
    peer is given the other end's sum."""
    if not ends:
        return False
    is_given = any(other_end(plan, it) is not None for it in plan.stage_holders())
    return is_given and any(end in plan.layers_of(peer_id) for end in ends)


def receivers(plan: Plan, me: str) -> tuple[tuple[int, str], ...]:
    """(end, peer) for each peer that waits for an end's sum from `me`; several where `me` stands
    in."""
    lacking = ((peer, other_end(plan, peer)) for peer in plan.stage_holders())
    return tuple((lack[0], peer) for peer, lack in lacking if lack is not None and lack[1] == me)
