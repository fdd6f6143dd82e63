"""Placements worth starting from: every sensible depth, over all peers or the best of them."""

import itertools
from collections.abc import Iterator

from p2p_dtfm.core.cost_model.costs import Placement
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem

MANY_PEERS = 128
"""In larger swarms fewer shapes are tried, since each is dearer to cost."""


def initial_placements(problem: PlanningProblem) -> Iterator[Placement]:
    """Placements, the cheapest to cost first: each of the fastest peers alone, then ever more of
    the best peers."""
    if problem.ends is None:
        yield from _of_anybody(problem)
        return
    for placement in _of_anybody(problem):
        yield from _between_named(problem, placement)


def _between_named(problem: PlanningProblem, placement: Placement) -> Iterator[Placement]:
    """Placements of the same peers, where the run leaves the ends to named ones: `placement`, if
    named peers have all its ends; the named peers alone; and pipelines that named peers begin and
    end, with the others between them."""
    together = [peer for peers in placement for peer in peers]
    named = [peer for peer in together if problem.may_have(peer, 0)]
    others = [peer for peer in together if not problem.may_have(peer, 0)]
    alone = tuple((peer,) for peer in named)
    if placement != alone and all(problem.may_have(peer, 0) for peer in _ends(placement)):
        yield placement
    if alone:
        yield alone
    if len(named) < 2 or not others:
        return
    for count in sorted({1, min(len(placement), len(named) // 2, len(others))}):
        between = runs(others, count)
        pairs = zip(named[:count], named[count:], strict=False)
        yield tuple((a, *peers, b) for (a, b), peers in zip(pairs, between, strict=True))


def _ends(placement: Placement) -> Iterator[int]:
    for peers in placement:
        yield from (peers[0], peers[-1])


def _of_anybody(problem: PlanningProblem) -> Iterator[Placement]:
    everyone = list(range(problem.peer_count))
    by_speed = sorted(everyone, key=lambda p: (problem.devices.layer_ns[p].block_ns, p))
    by_links = sorted(everyone, key=lambda p: (-problem.links.reach_bytes_per_s[p], p))
    for peer in by_speed[:16]:
        yield ((peer,),)
    for count in _counts(problem.peer_count):
        orders = [by_links, by_speed] if count < problem.peer_count else [everyone]
        for order in orders:
            chosen = order[:count]
            chain = nearest_chain(problem, chosen)
            for stages in stage_counts(problem, count):
                yield from _arranged(problem, chain, chosen, stages)


def _arranged(
    problem: PlanningProblem, chain: list[int], chosen: list[int], stages: int
) -> Iterator[Placement]:
    """Pipelines inside neighbourhoods, of peers as listed, across neighbourhoods, and of like total
    speed. Then pipelines with peers of like links in one stage, and deeper ones for worse links."""
    pipelines = max(1, len(chain) // stages)
    even = chain[: pipelines * stages]
    listed = sorted(chosen)
    yield runs(chain, pipelines)
    yield runs(listed, pipelines)
    if len(even) < len(chain):
        yield runs(even, pipelines)
        yield runs(listed[: len(even)], pipelines)
    if stages > 1 and pipelines > 1:
        yield tuple(tuple(even[first::pipelines]) for first in range(pipelines))
        fastest_first = sorted(chain, key=lambda p: problem.devices.layer_ns[p].block_ns)
        yield tuple(tuple(fastest_first[first::pipelines]) for first in range(pipelines))
        yield _layered(problem, even, pipelines)
    if pipelines > 1:
        yield from _deeper(problem, chain, stages)


def _layered(problem: PlanningProblem, chain: list[int], pipelines: int) -> Placement:
    """Pipelines with the peers of the best links in the first stage, which ends last and has the
    most to reduce."""
    place = {peer: at for at, peer in enumerate(chain)}
    reach = problem.links.reach_bytes_per_s
    by_links = sorted(chain, key=lambda p: (-reach[p], place[p]))
    layers = [by_links[at : at + pipelines] for at in range(0, len(chain), pipelines)]
    return tuple(zip(*(sorted(layer, key=place.__getitem__) for layer in layers), strict=True))


def _deeper(problem: PlanningProblem, chain: list[int], stages: int) -> Iterator[Placement]:
    """Pipelines in which the half of the peers with the worse links has twice as many stages.

    Each of these peers then holds half as much, to be reduced among fewer holders.
    """
    depth = 2 * stages
    place = {peer: at for at, peer in enumerate(chain)}
    reach = problem.links.reach_bytes_per_s
    by_links = sorted(chain, key=lambda p: (-reach[p], place[p]))
    half = len(chain) // 2
    better = sorted(by_links[:half], key=place.__getitem__)
    worse = sorted(by_links[half:], key=place.__getitem__)
    if depth <= problem.layer_count and len(better) >= stages and len(worse) >= depth:
        yield runs(better, len(better) // stages) + runs(worse, len(worse) // depth)


def _counts(peer_count: int) -> list[int]:
    """Numbers of peers up to all, each a third more than the last; in large swarms each twice the
    last."""
    counts, count = [], peer_count
    while count > 1:
        counts.append(count)
        count -= max(1, count // (4 if peer_count <= MANY_PEERS else 2))
    return counts[::-1]


def stage_counts(problem: PlanningProblem, peer_count: int) -> list[int]:
    """Numbers of stages: all up to 12, then ever farther apart; in large swarms sooner so."""
    spacing = 6 if problem.peer_count <= MANY_PEERS else 2
    most = min(peer_count, problem.most_stages)
    counts, stages = [], 1
    while stages <= most:
        counts.append(stages)
        stages += max(1, stages // spacing)
    return counts


def runs(chain: list[int], pipelines: int) -> Placement:
    """Cut a chain into runs whose lengths differ by one at most."""
    count = len(chain)
    edges = [count * number // pipelines for number in range(pipelines + 1)]
    return tuple(tuple(chain[a:b]) for a, b in itertools.pairwise(edges))


def nearest_chain(problem: PlanningProblem, peers: list[int]) -> list[int]:
    """A path through all peers that always goes on to the one that a tensor reaches soonest."""
    left = sorted(peers)
    chain = left[:1]
    del left[:1]
    while left:
        out, latency = problem.links.transmit_ns[chain[-1]], problem.links.latency_ns[chain[-1]]
        costs = [out[peer] + latency[peer] for peer in left]
        chain.append(left.pop(costs.index(min(costs))))
    return chain
