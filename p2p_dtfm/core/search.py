"""Search for the placement with the shortest predicted step: many starts, then local moves."""

import itertools
from collections.abc import Iterator

from p2p_dtfm.core.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.prng import Prng
from p2p_dtfm.core.problem import Problem

WORK_LIMIT = 400_000
ITER = 1
"""Peers and links that one search may look at; the same bound on every machine."""


def search(model: StepModel, fallback: tuple[int, ...], prng: Prng) -> PlacementCost:
    """The best placement found; `fallback` is a pipeline that is known to fit."""
    best = model.cost((fallback,))
    assert best is not None, "the fallback pipeline fits"
    for placement in starts(model.problem):
        best = better(best, model.cost(placement))
    return _descend(model, best, prng)


def better(held: PlacementCost, other: PlacementCost | None) -> PlacementCost:
    """The cheaper one; among equals the one that uses more peers, then the one held."""
    if other is None:
        return held
    return other if rank(other) < rank(held) else held


def rank(cost: PlacementCost) -> tuple[int, int]:
    return cost.step_ns, -sum(map(len, cost.placement))


def starts(problem: Problem) -> Iterator[Placement]:
    """Placements worth trying: every sensible number of stages, peers grouped in three ways."""
    chain = nearest_chain(problem, list(range(problem.peer_count)))
    by_speed = sorted(range(problem.peer_count), key=lambda p: (problem.layer_ns[p].block_ns, p))
    for peer in range(problem.peer_count):
        yield ((peer,),)
    for stages in stage_counts(problem):
        pipelines = max(1, problem.peer_count // stages)
        yield _runs(chain, pipelines)
        yield _runs(chain[: pipelines * stages], pipelines)
        yield tuple(tuple(chain[first::pipelines]) for first in range(pipelines))
        yield tuple(
            tuple(nearest_chain(problem, by_speed[first::pipelines])) for first in range(pipelines)
        )


def stage_counts(problem: Problem) -> list[int]:
    """All up to 16, then ever farther apart."""
    most = min(problem.peer_count, problem.layer_count)
    counts, stages = [], 1
    while stages <= most:
        counts.append(stages)
        stages += max(1, stages // 8)
    return counts


def _runs(chain: list[int], pipelines: int) -> Placement:
    """Cut a chain into runs whose lengths differ by one at most."""
    count = len(chain)
    edges = [count * number // pipelines for number in range(pipelines + 1)]
    return tuple(tuple(chain[a:b]) for a, b in itertools.pairwise(edges))


def nearest_chain(problem: Problem, peers: list[int]) -> list[int]:
    """A path through all peers, each time to the one that a tensor reaches soonest."""
    if not peers:
        return []
    left = sorted(peers)
    chain = [left.pop(0)]
    while left:
        here = chain[-1]
        out, latency = problem.transmit_ns[here], problem.latency_ns[here]
        nearest = min(left, key=lambda peer: (out[peer] + latency[peer], peer))
        left.remove(nearest)
        chain.append(nearest)
    return chain


def _descend(model: StepModel, best: PlacementCost, prng: Prng) -> PlacementCost:
    """Random moves, each kept when it does not make the step longer, until the work is spent."""
    limit = model.work + WORK_LIMIT
    peer_count = model.problem.peer_count
    if peer_count == 1:
        return best
    present = best
    for _ in range(ITER * 200 * peer_count):
        if model.work >= limit:
            break
        model.work += len(present.placement)
        moved = random_move(present.placement, peer_count, prng)
        cost = model.cost(moved) if moved else None
        if cost is not None and rank(cost) <= rank(present):
            present = cost
    return present


def random_move(placement: Placement, peer_count: int, prng: Prng) -> Placement | None:
    """A neighbour of a placement; None when the move drawn does not apply."""
    pipelines = [list(peers) for peers in placement]
    used = {peer for peers in pipelines for peer in peers}
    spares = [peer for peer in range(peer_count) if peer not in used]
    kind = prng.below(6)
    source = pipelines[prng.below(len(pipelines))]
    target = pipelines[prng.below(len(pipelines))]
    here, there = prng.below(len(source)), prng.below(len(target))
    if kind == 0:
        source[here], target[there] = target[there], source[here]
    elif kind == 1:
        target.insert(min(there, len(target)), source.pop(here))
    elif kind == 2 and spares:
        source.insert(here, spares[prng.below(len(spares))])
    elif kind == 3 and spares:
        source[here] = spares[prng.below(len(spares))]
    elif kind == 4:
        source.pop(here)
    elif source is not target:
        source.extend(target)
        target.clear()
    else:
        pipelines.append(source[here:])
        del source[here:]
    return tuple(tuple(peers) for peers in pipelines if peers) or None
