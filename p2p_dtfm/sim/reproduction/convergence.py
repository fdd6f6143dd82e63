"""How fast different searches come down on the paper's cost, seed by seed."""

import random
import time
from array import array
from typing import Any

from p2p_dtfm.sim.paper.annealing import Q20, anneal, ground_of
from p2p_dtfm.sim.paper.cost import PaperProblem
from p2p_dtfm.sim.paper.evaluation import Progress
from p2p_dtfm.sim.paper.evolution import draw, evolve
from p2p_dtfm.sim.paper.published import PLANNED_SCENARIOS, STAGES
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of
from p2p_dtfm.sim.paper.solver import solving
from p2p_dtfm.sim.scenario.files import read_scenario

CASES = tuple(PLANNED_SCENARIOS)
EVOLUTIONARY, EXCHANGES = "evolutionary algorithm", "the same with Kernighan-Lin"
ANNEALING, DRAWS, OURS = "annealing", "random draws", "ours"
METHODS = (DRAWS, EXCHANGES, EVOLUTIONARY, ANNEALING, OURS)
SEEDS = 5
EVALUATIONS = 1000
ANNEALED_MOVES = (300, 1_000, 3_000, 10_000, 30_000, 100_000)
LEVELS = 100
HOTTEST_NS = 2 * 10**9
REACHED = 1 + 1e-4
"""A cost this near to the best known one counts as reached."""


def case_problem(case: str) -> PaperProblem:
    """A case as the paper's scheduler saw it, with the paper's constants."""
    scenario = read_scenario(PLANNED_SCENARIOS[case])
    return paper_problem_of(scenario, STAGES, len(scenario.peers) // STAGES)


def curve_of(case: str, method: str, seed: int) -> dict[str, Any]:
    """Evaluations, seconds of one process, and cost of the best so far."""
    problem = case_problem(case)
    found = _searched(problem, method, seed)
    return {
        "evaluations": [each.evaluations for each in found],
        "seconds": [round(each.seconds, 4) for each in found],
        "total_s": [each.total_ns / 1e9 for each in found],
    }


def _searched(problem: PaperProblem, method: str, seed: int) -> list[Progress]:
    if method == EVOLUTIONARY:
        return evolve(problem, "circular", seed, EVALUATIONS)
    if method == EXCHANGES:
        return evolve(problem, "kernighan-lin", seed, EVALUATIONS)
    if method == DRAWS:
        return draw(problem, seed, EVALUATIONS)
    if method == ANNEALING:
        return _annealed(problem, seed)
    return solving(shuffled(problem, seed))


def _annealed(problem: PaperProblem, seed: int) -> list[Progress]:
    """Annealed from a random placement, 2 s down to 20 ms, with more and more moves, each time
    anew."""
    ground = ground_of(problem)
    chance = random.Random(f"anneal {seed}")
    start = list(range(problem.peer_count))
    chance.shuffle(start)
    found = []
    for moves in ANNEALED_MOVES:
        factor = round(0.01 ** (1 / LEVELS) * Q20)
        began = time.process_time()
        total, _ = anneal(
            ground, tuple(start), chance.getrandbits(62), HOTTEST_NS, factor, LEVELS,
            max(1, moves // LEVELS),
        )  # fmt: skip
        found.append(Progress(moves, time.process_time() - began, total))
    return found


def shuffled(problem: PaperProblem, seed: int) -> PaperProblem:
    """The same peers in another order, which is another seed to our solver. Seed 0 leaves them as
    they are."""
    order = list(range(problem.peer_count))
    if seed:
        random.Random(f"order {seed}").shuffle(order)
    count = problem.peer_count

    def moved(table: "array[int]") -> "array[int]":
        return array("q", [table[a * count + b] for a in order for b in order])

    return PaperProblem(
        tuple(problem.peer_ids[peer] for peer in order),
        problem.stage_count,
        problem.replica_count,
        moved(problem.data_parallel_ns),
        moved(problem.pipeline_ns),
    )
