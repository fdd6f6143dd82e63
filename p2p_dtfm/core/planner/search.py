"""Search for the placement with the shortest predicted step: many starts, then local moves.

All bounds are counts of work, in units of about a microsecond of one 2020s core, so that every
machine stops at the same placement.
"""

import itertools
from collections.abc import Iterator
from dataclasses import replace

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.planner.initial_placements import (
    MANY_PEERS,
    initial_placements,
    nearest_chain,
)
from p2p_dtfm.core.planner.moves import random_move
from p2p_dtfm.core.planner.remembered_costs import RememberedCosts
from p2p_dtfm.core.protocol.prng import Prng

WORK_FOR_EACH_PEER = 180_000
WORK_FOR_ANY, WORK_FOR_EACH_OF_MANY = 7_000_000, 5_000
FEW_PEERS = 16
"""Fewer peers have so much less to choose from that the search gets less work for each."""
ROUNDS = 8
"""Starts that are improved; half of them drop out after each round."""
COARSE_DIVISOR = 128
"""At first a placement is accepted that is worse by at most one part in so many of a step."""
PATIENCE = 300
"""Moves without gain, for each peer, after which a descent ends."""
FINALISTS = 24
"""This many of the cheapest starts, with all that became of them, are timed once more, with more
care."""
FINALISTS_OF_MANY = 12
"""Finalists in large swarms, where each takes a tenth of a second."""
VERY_MANY_PEERS = 512
FINALISTS_OF_VERY_MANY = 4
"""Finalists in very large swarms, where each takes a second. In five swarms of 640 to 1,024 peers
the step is 0.991 to 1.002 of that with twelve."""
LAST_FINALISTS = 4
"""So many of the best, and the best of each number of pipelines, are simulated if that is cheap."""
EVENTS = 600_000
"""Events simulated while a finalist is chosen, and again while its microbatches are dealt."""
FEW_EVENTS = 200_000
"""Further finalists are simulated within so many events. So are better cuts of the chosen one."""
PAIRS_FOR_DEALS = 2_000_000
"""Pairs of holders that may be looked at, where fewer than `FEW_DEALS` deals can be simulated."""
FEW_DEALS = 12


HURRY_DIVISOR = 12
"""A swarm that stands still gives its search this part of the work: it starts from what stands."""


def search(
    model: StepModel,
    fallback: tuple[int, ...],
    prng: Prng,
    present: Placement | None = None,
    in_a_hurry: bool = False,
) -> PlacementCost:
    """The best placement found; `fallback` is a pipeline that is known to fit."""
    best = model.cost((fallback,))
    assert best is not None, "the fallback pipeline fits"
    peer_count = model.problem.peer_count
    if peer_count == 1:
        return best
    few = min(peer_count, FEW_PEERS)
    divisor = HURRY_DIVISOR if in_a_hurry else 1
    budget = (
        min(
            WORK_FOR_EACH_PEER * peer_count * few // FEW_PEERS,
            WORK_FOR_ANY + WORK_FOR_EACH_OF_MANY * peer_count,
        )
        // divisor
    )
    finalists = _finalists(peer_count)
    costs = RememberedCosts(model)
    pool = _first_costs(model, costs, best, present, budget // 3)[:finalists]
    share = 2 * budget // (3 * ROUNDS * ROUNDS.bit_length())
    survivors, found = _refined_first(model, pool)[:ROUNDS], pool
    while len(survivors) > 1:
        improved = [_anneal(model, costs, start, prng, share) for start in survivors]
        found += improved
        survivors = _refined_first(model, improved)[: len(survivors) // 2]
        share *= 2
    return _judged(model, [_anneal(model, costs, survivors[0], prng, share), *found], divisor)


def _finalists(peer_count: int) -> int:
    if peer_count <= MANY_PEERS:
        return FINALISTS
    return FINALISTS_OF_MANY if peer_count <= VERY_MANY_PEERS else FINALISTS_OF_VERY_MANY


def _refined_first(model: StepModel, found: list[PlacementCost]) -> list[PlacementCost]:
    """The placements sorted by cost, timed link by link: what overlaps differs between shapes."""
    return sorted(found, key=lambda cost: rank(model.refined(cost)))


def _judged(model: StepModel, found: list[PlacementCost], divisor: int) -> PlacementCost:
    """The best of the cheapest placements, timed link by link, and the best of these message by
    message; with one part in `divisor` of the usual work."""
    distinct = {cost.placement: cost for cost in found}
    refined = _refined_first(model, list(distinct.values()))
    unlike: dict[int, PlacementCost] = {}
    for cost in refined:
        unlike.setdefault(len(cost.placement), cost)
    first = dict.fromkeys([*refined[:LAST_FINALISTS], *unlike.values()])
    wanted = list(dict.fromkeys([*first, *refined[:FINALISTS]]))
    spent = list(itertools.accumulate(map(model.events, wanted)))
    affordable = sum(events <= EVENTS // divisor for events in spent[: len(first)])
    affordable += sum(events <= FEW_EVENTS // divisor for events in spent[len(first) :])
    if affordable < 2:
        return _dealt_well(model, refined[0], divisor)
    best = _soonest(model, wanted[:affordable])
    return _cut_well(model, _dealt_well(model, best, divisor), divisor)


def _soonest(model: StepModel, found: list[PlacementCost]) -> PlacementCost:
    """The placement with the shortest step, timed message by message. A simulation ends as soon as
    it is surely later than the best."""
    best = found[0]
    best_rank = rank(model.simulated(best))
    for cost in found[1:]:
        timed = model.simulated_within(cost, best_rank[0])
        if timed is not None and rank(timed) < best_rank:
            best, best_rank = cost, rank(timed)
    return best


def _cut_well(model: StepModel, cost: PlacementCost, divisor: int) -> PlacementCost:
    """The placement with single layers, or microbatches, handed on as long as the step gets
    shorter.

    The search cuts for the shortest period only, and not for how a step ends.
    """
    tries = FEW_EVENTS // divisor // model.events(cost)
    best_ns = model.simulated(cost).step_ns
    neighbours = _neighbours(model, cost)
    while tries > 0 and (moved := next(neighbours, None)) is not None:
        tries -= 1
        if model.events(moved) > EVENTS:  # other cuts may make many more pairs of holders
            continue
        timed = model.simulated_within(moved, best_ns)
        if timed is not None and timed.step_ns < best_ns:
            cost, best_ns = moved, timed.step_ns
            neighbours = _neighbours(model, cost)
    return cost


def _neighbours(model: StepModel, cost: PlacementCost) -> Iterator[PlacementCost]:
    yield from _less_owed(model, cost)
    yield from _cut_anew(model, cost)
    for dealt in _handed_on(cost):
        yield model.dealt(cost.placement, list(cost.pipelines), dealt)


def _less_owed(model: StepModel, cost: PlacementCost) -> Iterator[PlacementCost]:
    """The placement with fewer microbatches in flight: a stage that owes less of its backwards has
    its own gradients sooner."""
    for number, (peers, pipeline) in enumerate(zip(cost.placement, cost.pipelines, strict=True)):
        wanted, _ = model.pipelines_in(len(cost.placement)).time(peers, pipeline.cuts)
        fewer = tuple(map(min, wanted, pipeline.in_flight))
        if fewer != pipeline.in_flight:
            pipelines = list(cost.pipelines)
            pipelines[number] = replace(pipeline, in_flight=fewer)
            yield model.dealt(cost.placement, pipelines, cost.microbatches)


def _cut_anew(model: StepModel, cost: PlacementCost) -> Iterator[PlacementCost]:
    """The placement with one layer handed on from a stage to a neighbour; then the same in all
    pipelines that are cut alike there."""
    for number, pipeline in enumerate(cost.pipelines):
        for at in range(1, len(pipeline.cuts) - 1):
            edge = pipeline.cuts[at : at + 1]
            alike = [n for n, other in enumerate(cost.pipelines) if other.cuts[at : at + 1] == edge]
            together = [alike] if len(alike) > 1 and alike[0] == number else []
            for numbers, step in itertools.product([[number], *together], (-1, 1)):
                moved = _shifted(model, cost, numbers, at, step)
                if moved is not None:
                    yield moved


def _shifted(
    model: StepModel, cost: PlacementCost, numbers: list[int], at: int, step: int
) -> PlacementCost | None:
    """The placement with the cut `at` of these pipelines `step` layers later; None where that does
    not fit."""
    pipelines = list(cost.pipelines)
    for number in numbers:
        cuts = list(pipelines[number].cuts)
        cuts[at] += step
        if not cuts[at - 1] < cuts[at] < cuts[at + 1]:
            return None
        placed = model.pipelines_in(len(pipelines))
        timed = placed.time_fixed(cost.placement[number], tuple(cuts))
        if timed is None:
            return None
        pipelines[number] = timed
    return model.dealt(cost.placement, pipelines, cost.microbatches)


def _dealt_well(model: StepModel, cost: PlacementCost, divisor: int) -> PlacementCost:
    """The placement with left-over microbatches given to pipelines that delay the reduction least.

    Among equally fast pipelines, those with the best links get more first. Then single microbatches
    are handed on.
    """
    tries = EVENTS // divisor // model.events(cost) - 1
    is_simulated = tries >= FEW_DEALS
    if not is_simulated:
        tries = max(3, PAIRS_FOR_DEALS // divisor // model.pairs(cost))
    best_ns = (model.simulated if is_simulated else model.refined)(cost).step_ns
    deals = itertools.chain(_deals_by_links(model, cost), _handed_on(cost))
    for dealt in itertools.islice(deals, tries):
        moved = model.dealt(cost.placement, list(cost.pipelines), dealt)
        timed = model.simulated_within(moved, best_ns) if is_simulated else model.refined(moved)
        if timed is not None and timed.step_ns < best_ns:
            cost, best_ns = moved, timed.step_ns
    return cost


def _deals_by_links(model: StepModel, cost: PlacementCost) -> Iterator[tuple[int, ...]]:
    alike: dict[tuple[int, int], list[int]] = {}
    for number, pipeline in enumerate(cost.pipelines):
        alike.setdefault((pipeline.fill_ns, pipeline.period_ns), []).append(number)
    for order in _orders(model.problem, cost.placement):
        place = {number: at for at, number in enumerate(order)}
        dealt = list(cost.microbatches)
        for numbers in alike.values():
            counts = sorted((cost.microbatches[number] for number in numbers), reverse=True)
            for number, count in zip(sorted(numbers, key=place.__getitem__), counts, strict=True):
                dealt[number] = count
        yield tuple(dealt)


def _orders(problem: PlanningProblem, placement: Placement) -> Iterator[list[int]]:
    """Orders of the pipelines: by their links, best first; then with near ones side by side, which
    lets whole neighbourhoods end early."""
    slowest = [
        min(
            min(rate for other, rate in enumerate(problem.links.bytes_per_s[peer]) if other != peer)
            for peer in peers
        )
        for peers in placement
    ]
    medians = [min(problem.links.reach_bytes_per_s[peer] for peer in peers) for peers in placement]
    nearness = [-max(problem.links.farthest_ns[peer] for peer in peers) for peers in placement]
    for links in (medians, slowest, nearness):
        yield sorted(range(len(placement)), key=lambda n: (-links[n], -nearness[n], n))
    listed = sorted(range(len(placement)), key=placement.__getitem__)
    chain = nearest_chain(problem, [peers[0] for peers in placement])
    owner = {peers[0]: number for number, peers in enumerate(placement)}
    near = [owner[peer] for peer in chain]
    yield from (listed, listed[::-1], near, near[::-1])


def _handed_on(cost: PlacementCost) -> Iterator[tuple[int, ...]]:
    """Deals with one microbatch moved from a pipeline to one of the three that would end soonest
    with it."""
    ends = [
        pipeline.duration_ns(count + 1)
        for pipeline, count in zip(cost.pipelines, cost.microbatches, strict=True)
    ]
    soonest = sorted(range(len(ends)), key=lambda number: (ends[number], number))
    takers = [number for number in soonest if ends[number] <= cost.compute_ns][:3]
    givers = [number for number in reversed(soonest) if cost.microbatches[number] > 1]
    pairs = ((giver, taker) for giver in givers for taker in takers if giver != taker)
    for giver, taker in pairs:
        dealt = list(cost.microbatches)
        dealt[giver] -= 1
        dealt[taker] += 1
        yield tuple(dealt)


def _first_costs(
    model: StepModel,
    costs: RememberedCosts,
    fallback: PlacementCost,
    present: Placement | None,
    budget: int,
) -> list[PlacementCost]:
    """Starts, cheapest first. Of those with as many pipelines and as long a first one, only the
    cheapest stays."""
    limit = model.work + budget
    by_shape: dict[tuple[int, int], PlacementCost] = {}
    offers = [present] if present else []
    for placement in [*offers, *initial_placements(model.problem)]:
        cost = costs.of_start(placement)
        if cost is not None:
            shape = (len(cost.placement), len(cost.placement[0]))
            held = by_shape.get(shape)
            if held is None or rank(cost) < rank(held):
                by_shape[shape] = cost
        if model.work > limit:
            break
    return sorted([fallback, *by_shape.values()], key=rank)


def rank(cost: PlacementCost) -> tuple[int, int, Placement]:
    """A sort key: cheaper first; among equals the one that uses more peers."""
    return cost.step_ns, -sum(map(len, cost.placement)), cost.placement


def _anneal(
    model: StepModel, costs: RememberedCosts, start: PlacementCost, prng: Prng, budget: int
) -> PlacementCost:
    """Random moves from `start`; each is taken unless it lengthens the step by more than a
    threshold.

    The threshold falls from 1/128 of the step to nothing half-way (Dueck and Scheuer 1990:
    threshold accepting; without exponentials integers suffice).
    """
    peer_count = model.problem.peer_count
    present = best = start
    present_ns = best_ns = start.step_ns
    began, quiet, patience = model.work, 0, PATIENCE * peer_count
    while (spent := model.work - began) < budget and quiet < patience:
        model.spend(5 + len(present.placement))
        quiet += 1
        moved = random_move(present, peer_count, prng)
        if moved is None:
            continue
        bound = present_ns + present_ns // COARSE_DIVISOR * max(0, budget - 2 * spent) // budget
        cost = costs.cost(moved, bound)
        if cost is None or (step_ns := cost.step_ns) > bound:
            continue
        present, present_ns = cost, step_ns
        if step_ns <= best_ns and rank(cost) < rank(best):
            if step_ns < best_ns:
                quiet = 0
            best, best_ns = cost, step_ns
    return best
