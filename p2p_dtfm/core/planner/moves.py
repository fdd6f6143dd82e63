"""Neighbours of a placement."""

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost
from p2p_dtfm.core.protocol.prng import Prng

_Lists = list[list[int]]


def random_move(cost: PlacementCost, peer_count: int, prng: Prng) -> Placement | None:
    """A neighbour; None when the move drawn does not apply.

    A third of the moves concern the peer that holds up the reduction.
    """
    pipelines = [list(peers) for peers in cost.placement]
    source = pipelines[prng.below(len(pipelines))]
    if cost.critical >= 0 and prng.below(3) == 0:
        source = next(peers for peers in pipelines if cost.critical in peers)
        here = source.index(cost.critical)
    else:
        here = prng.below(len(source))
    target = pipelines[prng.below(len(pipelines))]
    there = prng.below(len(target))
    kind = prng.below(20)
    if kind < 5:
        _swap(source, here, target, min(here, len(target) - 1) if kind < 3 else there)
    elif kind < 7:
        peer = source.pop(here)
        target.insert(min(there, len(target)), peer)
    elif kind < 11:
        _call_spare(pipelines, source, here, kind, peer_count, prng)
    elif kind < 12:
        source.pop(here)
    elif kind < 13:
        source.clear()
    elif kind < 14:
        _dissolve(pipelines, source, prng)
    elif kind < 16:
        _swap_positions(pipelines if kind < 15 else [source], prng)
    elif kind < 17:
        for peers in pipelines:
            peers.reverse()
    elif kind < 18:
        source.reverse()
    elif kind < 19:
        if source is target:
            return None
        source.extend(target)
        target.clear()
    else:
        pipelines.append(source[here:])
        del source[here:]
    return tuple(tuple(peers) for peers in pipelines if peers) or None


def _swap(source: list[int], here: int, target: list[int], there: int) -> None:
    source[here], target[there] = target[there], source[here]


def _swap_positions(pipelines: _Lists, prng: Prng) -> None:
    """Exchange two stages alike in all pipelines, since replicas gain by having equal cuts."""
    longest = max(map(len, pipelines))
    a, b = prng.below(longest), prng.below(longest)
    for peers in pipelines:
        if max(a, b) < len(peers):
            _swap(peers, a, peers, b)


def _call_spare(
    pipelines: _Lists, source: list[int], here: int, kind: int, peer_count: int, prng: Prng
) -> None:
    """Insert a spare, put it in a peer's place, or make a pipeline of several."""
    used = {peer for peers in pipelines for peer in peers}
    spares = [peer for peer in range(peer_count) if peer not in used]
    if not spares:
        return
    spare = spares[prng.below(len(spares))]
    if kind == 7:
        source.insert(here, spare)
    elif kind < 10:
        source[here] = spare
    else:
        prng.shuffle(spares)
        pipelines.append(spares[: len(source)])


def _dissolve(pipelines: _Lists, source: list[int], prng: Prng) -> None:
    """Hand the peers of a pipeline to the others, each at some place."""
    others = [peers for peers in pipelines if peers is not source]
    if not others:
        return
    for peer in source:
        target = others[prng.below(len(others))]
        target.insert(prng.below(len(target) + 1), peer)
    source.clear()
