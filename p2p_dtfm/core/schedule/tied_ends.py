"""A head that is the token embedding: which holders of the two ends give each other their sums.

Both layers keep a copy of the one matrix. Each is reduced among its own holders first. Then, within
each pipeline whose ends lie with two peers, the first gives the last the embedding's sum and the
last gives the first the head's. All holders of an end have the same sum of it, and of two numbers
either order adds up to the same bits: so every copy gets the same gradient, and one pipeline waits
for no other.
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
    """How the matrix travels: first element and end of each part."""
    count = spec.model.vocabulary * spec.model.width
    return tuple(pairwise([*range(0, count, CHUNK_ELEMENTS), count]))


def other_end(plan: Plan, me: str) -> tuple[int, str] | None:
    """The end that a holder of the other one lacks, and who gives it: the peer at the far end of
    its own pipeline. None for who holds both ends or neither."""
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
    """Whether a peer says what both ends' sums of the matrix are: who has one of them, where
    anybody is given the other's."""
    if not ends:
        return False
    is_given = any(other_end(plan, it) is not None for it in plan.stage_holders())
    return is_given and any(end in plan.layers_of(peer_id) for end in ends)


def receivers(plan: Plan, me: str) -> tuple[tuple[int, str], ...]:
    """(end, peer) of all that wait for an end's sum from this peer: several where it stands in."""
    lacking = ((peer, other_end(plan, peer)) for peer in plan.stage_holders())
    return tuple((lack[0], peer) for peer, lack in lacking if lack is not None and lack[1] == me)
