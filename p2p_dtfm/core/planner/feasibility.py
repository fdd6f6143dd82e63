"""Whether any pipeline of the members can hold the model, and if not, what is short."""

from itertools import chain, permutations

from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.cost_model.tables.layer_tables import LayerBytes
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.plan import NoPlan

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
    """Of unlike layers: each peer alone, then the largest first, each with as many layers as fit;
    and the few largest in every order, so that nobody who comes takes away what they could do. Of
    many, another order might fit where none of these does."""
    memory_bytes = problem.devices.memory_bytes
    roomy = sorted(range(problem.peer_count), key=lambda peer: (-memory_bytes[peer], peer))
    whole = [tuple(roomy), tuple(reversed(roomy))] if len(roomy) > _FEW_PEERS else []
    for order in chain(whole, permutations(roomy[:_FEW_PEERS])):
        held = _unlike_holders(problem, order)
        if held is not None:
            return held
    return None


def _unlike_holders(problem: PlanningProblem, order: tuple[int, ...]) -> tuple[int, ...] | None:
    """Those of `order` that hold all layers; who has no room for the next holds none."""
    layer, holders = 0, []
    for peer in order:
        left_bytes, first = problem.devices.memory_bytes[peer], layer
        while layer < problem.layer_count:
            left_bytes -= problem.layers.unlike[layer].needed_bytes
            if left_bytes < 0:
                break
            layer += 1
        if layer > first:
            holders.append(peer)
        if layer == problem.layer_count:
            return tuple(holders)
    return None


def _block_capacities(problem: PlanningProblem) -> list[int]:
    block_bytes = max(1, problem.layers.block.needed_bytes)
    return [memory // block_bytes for memory in problem.devices.memory_bytes]


def _end_capacity(problem: PlanningProblem, peer: int, embedding: bool, head: bool) -> int:
    """Blocks that fit beside the embedding and/or the head; below 0 if those do not fit, or are
    not left to this peer."""
    if (embedding or head) and not problem.may_have(peer, 0):
        return -1
    room = problem.devices.memory_bytes[peer]
    room -= problem.layers.embedding.needed_bytes if embedding else 0
    room -= problem.layers.head.needed_bytes if head else 0
    return room // max(1, problem.layers.block.needed_bytes)


def _best_ends(problem: PlanningProblem, capacities: list[int], with_embedding: bool) -> list[int]:
    """The peers that lose the fewest blocks by holding an end, several for want of ties."""
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
    offered = sum(problem.devices.memory_bytes)
    needed = problem.layers.state_bytes(0, problem.layer_count) + problem.layers.saved_bytes(
        0, problem.layer_count
    )
    most = max(problem.devices.memory_bytes, default=0)
    if problem.step.one_stage:
        return NoPlan(
            f"the head of this run is its token embedding, so where work is audited each peer "
            f"holds the whole model: "
            f"that needs {gibibytes(needed)} on one peer; the largest of {problem.peer_count} "
            f"offers {gibibytes(most)}: {gibibytes(needed - most)} more memory is needed",
            needed - most,
        )
    if problem.ends is not None and not any(peer < problem.peer_count for peer in problem.ends):
        return NoPlan(
            "this run leaves its first and last stages to members that it names "
            "(`privacy.ends`), and none of them is here to train: they wait for one of them",
            0,
        )
    offer = "offers" if problem.peer_count == 1 else "offer"
    peers = f"{counted(problem.peer_count, 'peer')} {offer}"
    if offered < needed:
        return NoPlan(
            f"this run needs {gibibytes(needed)} for its layers; {peers} {gibibytes(offered)}: "
            f"{gibibytes(needed - offered)} more memory is needed",
            needed - offered,
        )
    for name, layer in _named_layers(problem):
        size = layer.needed_bytes
        if size > most:
            return NoPlan(
                f"{name} needs {gibibytes(size)} on one peer; the largest of "
                f"{problem.peer_count} offers {gibibytes(most)}: that peer needs "
                f"{gibibytes(size - most)} more memory",
                size - most,
            )
    unlike = problem.layers.unlike
    short = min(layer.needed_bytes for layer in unlike) if unlike else _rounding_loss(problem)
    return NoPlan(
        f"this run needs {gibibytes(needed)} for its layers; {peers} {gibibytes(offered)}, but "
        f"layers do not divide: {gibibytes(short)} more memory is needed",
        short,
    )


def _named_layers(problem: PlanningProblem) -> list[tuple[str, LayerBytes]]:
    """Those that may be too large for any peer."""
    if problem.layers.unlike:
        return [(f"layer {number}", layer) for number, layer in enumerate(problem.layers.unlike)]
    return [
        ("the embedding", problem.layers.embedding),
        ("the head", problem.layers.head),
        ("the transformer block", problem.layers.block),
    ]


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
    return max(1, fewest) * problem.layers.block.needed_bytes


def gibibytes(size: int) -> str:
    """`24.1 GiB`, or MiB or KiB where that reads better; rounded up, so never too little."""
    return bytes_text(size, rounded_up=True)
