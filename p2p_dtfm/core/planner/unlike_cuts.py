"""Cuts of unlike layers: the search's result is compared with cuts that the search does not try.

The search cuts for the shortest period, and then hands on single layers. Between layers of unlike
width the best cut can lie several layers away, behind a boundary that is dear to cross. So with few
peers and layers, all cuts of single pipelines are tried.
"""

from collections.abc import Iterator
from itertools import combinations, permutations

from p2p_dtfm.core.cost_model.costs import PlacementCost, StepModel
from p2p_dtfm.core.planner.search import EVENTS, HURRY_DIVISOR, rank

FEW_PEERS = 3
FEW_LAYERS = 16


def best_cut(model: StepModel, found: PlacementCost, in_a_hurry: bool = False) -> PlacementCost:
    """`found`, or a pipeline of a few peers whose step is shorter, message by message.

    A pipeline is not simulated if its busiest stage alone takes longer. The most promising come
    first, up to a bound on simulated events.
    """
    problem = model.problem
    few = problem.peer_count <= FEW_PEERS and problem.layer_count <= FEW_LAYERS
    if not (problem.layers.unlike and few):
        return found
    best = model.judged(found)
    spent, limit = 0, 8 * EVENTS // (HURRY_DIVISOR if in_a_hurry else 1)
    chosen = found
    for busiest_ns, candidate in sorted(
        _pipelines(model), key=lambda each: (each[0], rank(each[1]))
    ):
        if busiest_ns >= best.step_ns:
            break
        spent += model.events(candidate)
        if spent > limit:
            break
        judged = model.judged(candidate)
        if judged.step_ns < best.step_ns:
            best, chosen = judged, candidate
    return chosen


def _pipelines(model: StepModel) -> Iterator[tuple[int, PlacementCost]]:
    """(least time of the busiest stage for a step, pipeline), for each pipeline that fits."""
    problem = model.problem
    count, layers = problem.step.microbatch_count, problem.layer_count
    alone = model.pipelines_in(1)
    for depth in range(1, min(problem.peer_count, problem.most_stages) + 1):
        for peers in permutations(range(problem.peer_count), depth):
            for inner in combinations(range(1, layers), depth - 1):
                pipeline = alone.time_fixed(peers, (0, *inner, layers))
                if pipeline is None:
                    continue
                timings = alone.stage_timings(peers, pipeline)
                busiest_ns = count * max(each.forward_ns + each.backward_ns for each in timings)
                yield busiest_ns, model.dealt((peers,), [pipeline], (count,))
