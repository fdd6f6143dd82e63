"""Whether any single pipeline of the members can hold the model, and if not, what is short.

In a plan of several pipelines each stage takes more memory.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, permutations

from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.cost_model.tables.layer_tables import LayerTable
from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.plan import LEFT_TO_SOME, ON_ONE_PEER, NoPlan
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.workload import Workload

_FEW_PEERS = 6


def memory_pipeline(problem: PlanningProblem) -> tuple[int, ...] | None:
    """Few peers that hold the model in this order, or None if no peers can.

    Exact: a pipeline exists if and only if, for some first peer (which has room for the embedding)
    and last peer (which has room for the head), the blocks that fit on them and on all others
    between them cover the model.
    """
    if problem.layers.unlike:
        return _unlike_pipeline(problem)
    capacities = _block_capacities(problem)
    middle = sorted(range(problem.peer_count), key=lambda peer: (-capacities[peer], peer))
    firsts = _best_ends(problem, capacities, with_embedding=True)
    lasts = _best_ends(problem, capacities, with_embedding=False)
    best: tuple[int, ...] | None = None
    for peer in range(problem.peer_count):
        if _end_capacity(problem, peer, True, True) >= problem.layers.block_count:
            return (peer,)
    if problem.step.one_stage:
        return None
    for first in firsts:
        for last in lasts:
            if first == last:
                continue
            found = _cover(problem, capacities, middle, first, last)
            if found is not None and (best is None or len(found) < len(best)):
                best = found
    return best


def _unlike_pipeline(problem: PlanningProblem) -> tuple[int, ...] | None:
    """The holders of unlike layers: each peer in order holds as many layers as fit.

    Tried are the roomiest peers first, then last, and the few roomiest in every order. So a peer
    that comes never takes away what these could do. Among many peers, another order might fit where
    none of these does."""
    memory_bytes, layers = problem.devices.memory_bytes, problem.layers_alone

    def room(peer: int) -> tuple[int, int]:
        """How many whole models fit on the peer, as it holds them: on a card they take less."""
        return (memory_bytes[peer] << 32) // max(1, _whole_bytes(layers[peer])), memory_bytes[peer]

    roomy = sorted(range(problem.peer_count), key=lambda peer: (*(-it for it in room(peer)), peer))
    whole = [tuple(roomy), tuple(reversed(roomy))] if len(roomy) > _FEW_PEERS else []
    for order in chain(whole, permutations(roomy[:_FEW_PEERS])):
        held = _unlike_holders(problem, order)
        if held is not None:
            return held
    return None


def _unlike_holders(problem: PlanningProblem, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """The peers of `order` that together hold all layers; None if they cannot. A peer without room
    for the next layer holds none."""
    layer, holders = 0, []
    for peer in order:
        left_bytes, first = problem.devices.memory_bytes[peer], layer
        while layer < problem.layer_count:
            left_bytes -= problem.layers_alone[peer].unlike[layer].needed_bytes
            if left_bytes < 0:
                break
            layer += 1
        if layer > first:
            holders.append(peer)
        if layer == problem.layer_count:
            return tuple(holders)
    return None


def _block_capacities(problem: PlanningProblem) -> list[int]:
    memory = zip(problem.devices.memory_bytes, problem.layers_alone, strict=True)
    return [room // max(1, layers.block.needed_bytes) for room, layers in memory]


def _end_capacity(problem: PlanningProblem, peer: int, embedding: bool, head: bool) -> int:
    """Blocks that fit beside the embedding and/or the head; below 0 if these do not fit, or the run
    does not leave them to this peer."""
    if (embedding or head) and not problem.may_have(peer, 0):
        return -1
    room, layers = problem.devices.memory_bytes[peer], problem.layers_alone[peer]
    room -= layers.embedding.needed_bytes if embedding else 0
    room -= layers.head.needed_bytes if head else 0
    return room // max(1, layers.block.needed_bytes)


def _best_ends(problem: PlanningProblem, capacities: list[int], with_embedding: bool) -> list[int]:
    """The eight peers that lose the fewest blocks by holding an end."""
    able: list[tuple[int, int, int]] = []
    for peer, capacity in enumerate(capacities):
        left = _end_capacity(problem, peer, with_embedding, not with_embedding)
        if left >= 0:
            able.append((capacity - left, -left, peer))
    return [peer for _, _, peer in sorted(able)[:8]]


def _cover(
    problem: PlanningProblem, capacities: list[int], middle: list[int], first: int, last: int
) -> tuple[int, ...] | None:
    left = problem.layers.block_count
    left -= _end_capacity(problem, first, True, False)
    left -= _end_capacity(problem, last, False, True)
    between: list[int] = []
    for peer in middle:
        if left <= 0:
            break
        if peer in (first, last) or capacities[peer] == 0:
            continue
        between.append(peer)
        left -= capacities[peer]
    return (first, *between, last) if left <= 0 else None


def why_infeasible(problem: PlanningProblem) -> NoPlan:
    """Which memory is short, and by how much."""
    devices, count = problem.devices, problem.peer_count
    offers, aside = devices.offers, devices.aside_bytes
    wholes = [_whole_bytes(layers) for layers in problem.layers_alone]
    needed = min(wholes)
    if problem.step.one_stage:
        size, most = _nearest((whole + aside, offers[p]) for p, whole in enumerate(wholes))
        short = size - most
        return NoPlan(
            f"the head of this run is its token embedding, so where work is audited each peer "
            f"holds the whole model: "
            f"that needs {gibibytes(size)} {ON_ONE_PEER} {count} "
            f"offers {gibibytes(most)}: {gibibytes(short)} more memory is needed",
            short,
        )
    if problem.ends is not None and (refusal := _too_few_named(problem, offers, wholes)):
        return refusal
    peers = f"{counted(count, 'peer')} offer{'s' * (count == 1)} {gibibytes(sum(offers))}"
    if aside:
        sets = "it sets" if count == 1 else "each sets"
        peers += f", of which {sets} {gibibytes(aside)} aside to go back through a layer"
    rooms = zip(devices.memory_bytes, wholes, strict=True)  # counted as if all were cheapest kind
    if (usable := sum(room * needed // whole for room, whole in rooms)) < needed:
        short = needed - usable + max(0, aside - max(offers))
        return NoPlan(
            f"this run needs {gibibytes(needed)} for its layers; {peers}: "
            f"{gibibytes(short)} more memory is needed",
            short,
        )
    refusal = _too_large_layer(problem, offers) or _one_for_both_ends(problem, offers)
    return refusal or _undivided(problem, needed, peers)


def _whole_bytes(layers: LayerTable) -> int:
    """Bytes of the whole model, with one microbatch in flight."""
    return layers.state_bytes(0, layers.count) + layers.saved_bytes(0, layers.count)


def _nearest(pairs: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """(needed, offered) of the peer that lacks least: a card's stage takes less."""
    return min(pairs, key=lambda pair: (pair[0] - pair[1], -pair[1]), default=(0, 0))


def too_small(workload: Workload, record: PeerRecord) -> str:
    """Why no stage at all fits into what a member offers; empty where one may."""
    sizes = stage_memory(workload).of(record.device.kind, 1).layers
    allowed = (n for n in range(sizes.count) if workload.may_have(record.peer_id, n))
    needed = [sizes.of(layer).needed_bytes for layer in allowed]
    least = sum(needed) if workload.one_stage else min(needed, default=0)
    offered = record.device.memory_bytes
    if offered >= least:
        return ""
    return (
        f"it offers {bytes_text(offered)} for layers, and the least that it could hold takes "
        f"{bytes_text(least, rounded_up=True)}"
    )


def _too_few_named(
    problem: PlanningProblem, offers: Sequence[int], wholes: Sequence[int]
) -> NoPlan | None:
    """Why the peers to which the ends are left are too few: none is here, or one without room for
    the whole model, which both ends on one peer need. None if that is not so."""
    named = [peer for peer in range(problem.peer_count) if problem.may_have(peer, 0)]
    if not named:
        return NoPlan(
            "this run leaves its first and last stages to members that it names "
            f"{LEFT_TO_SOME}, and none of them is here to train: they wait for one of them",
            0,
        )
    whole_bytes = wholes[named[0]] + problem.devices.aside_bytes
    short = whole_bytes - offers[named[0]]
    if len(named) > 1 or short <= 0:
        return None
    return NoPlan(
        f"this run leaves its first and last stages to members that it names {LEFT_TO_SOME}, and "
        f"one of them is here to train: alone it needs {gibibytes(whole_bytes)} for the whole "
        f"model and offers {gibibytes(offers[named[0]])}: {gibibytes(short)} more memory is "
        "needed, or another one of them",
        short,
    )


def _too_large_layer(problem: PlanningProblem, offers: Sequence[int]) -> NoPlan | None:
    """Why a layer is too large for every peer that may have it; None if none is."""
    for name, number in _named_layers(problem):
        able = [peer for peer in range(problem.peer_count) if problem.may_have(peer, number)]
        size, most = _nearest((_alone_bytes(problem, peer, number), offers[peer]) for peer in able)
        if size > most:
            of_whom = f"{len(able)}{_left_to_some(problem, number)}"
            return NoPlan(
                f"{name} needs {gibibytes(size)} {ON_ONE_PEER} "
                f"{of_whom} offers {gibibytes(most)}: that peer needs "
                f"{gibibytes(size - most)} more memory",
                size - most,
            )
    return None


def _one_for_both_ends(problem: PlanningProblem, offers: Sequence[int]) -> NoPlan | None:
    """Why one peer is not enough for both ends, where it alone has room for either. None if that is
    not so."""
    outer = 0, problem.layer_count - 1
    ends = [(name, number) for name, number in _named_layers(problem) if number in outer]
    named = [peer for peer in range(problem.peer_count) if problem.may_have(peer, 0)]

    def size_of(peer: int, end: int) -> int:
        return _alone_bytes(problem, peer, end)

    able = {peer for peer in named for _, end in ends if offers[peer] >= size_of(peer, end)}
    if len(able) != 1:
        return None
    name, end = min(ends, key=lambda each: problem.layers.of(each[1]).needed_bytes)
    others = [peer for peer in named if peer not in able]
    size, second = _nearest((size_of(peer, end), offers[peer]) for peer in others)
    of_whom = f"{counted(len(named) - 1, 'other')}{_left_to_some(problem, 0)}"
    return NoPlan(
        f"one peer alone has room for the first or the last stage, and they need two: {name} needs "
        f"{gibibytes(size)} {ON_ONE_PEER} {of_whom} offers {gibibytes(second)}: that peer needs "
        f"{gibibytes(size - second)} more memory",
        size - second,
    )


def _alone_bytes(problem: PlanningProblem, peer: int, layer: int) -> int:
    """Bytes that this peer must offer to hold this layer and no other."""
    return problem.layers_alone[peer].of(layer).needed_bytes + problem.devices.aside_bytes


def _left_to_some(problem: PlanningProblem, layer: int) -> str:
    """A remark for a layer that the run leaves to some peers: others may not have it."""
    is_left = problem.ends is not None and layer in (0, problem.layer_count - 1)
    return f" {LEFT_TO_SOME}" if is_left else ""


def _undivided(problem: PlanningProblem, needed: int, peers: str) -> NoPlan:
    """Why enough memory in sum does not suffice: what several peers have left is of no use."""
    unlike = min(problem.layers_alone, key=_whole_bytes).unlike
    short = min(layer.needed_bytes for layer in unlike) if unlike else _rounding_loss(problem)
    return NoPlan(
        f"this run needs {gibibytes(needed)} for its layers; {peers}, but "
        f"layers do not divide: {gibibytes(short)} more memory is needed",
        short,
    )


def _named_layers(problem: PlanningProblem) -> list[tuple[str, int]]:
    """The layers that may be too large for any peer: name and number of each."""
    if problem.layers.unlike:
        return [(f"layer {number}", number) for number in range(problem.layer_count)]
    ends = [("the embedding", 0), ("the head", problem.layer_count - 1)]
    return [*ends, ("the transformer block", 1)]


def _rounding_loss(problem: PlanningProblem) -> int:
    """Bytes of the blocks that stay without a place when every peer takes whole layers."""
    capacities = _block_capacities(problem)
    fewest = problem.layers.block_count
    for first in _best_ends(problem, capacities, True):
        for last in _best_ends(problem, capacities, False):
            if first != last:
                held = sum(c for p, c in enumerate(capacities) if p not in (first, last))
                held += _end_capacity(problem, first, True, False)
                held += _end_capacity(problem, last, False, True)
                fewest = min(fewest, problem.layers.block_count - held)
    return max(1, fewest) * min(layers.block.needed_bytes for layers in problem.layers_alone)


def gibibytes(size: int) -> str:
    """`24.1 GiB`, or MiB or KiB where that reads better; rounded up, so never too little."""
    return bytes_text(size, rounded_up=True)
