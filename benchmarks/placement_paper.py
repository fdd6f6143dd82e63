"""The paper's placement problem: known optima, asymmetric instances, and a long search to compare.

    python -m benchmarks.placement_paper [--instances 10] [--quick] [--json]

Costs in seconds by DT-FM's equations; times are of this process on one core, without imports. The
long search anneals from random placements, 3,000,000 moves each, and runs our solver with ten
times its effort under other seeds; `gap` is how far our plan is above the best that any of it
found. `annealed` is one plain annealing of 200,000 moves from a random placement.
"""

import argparse
import json
import random
import time

from benchmarks.random_swarms import uneven_cities
from p2p_dtfm.core.paper_anneal import Q20, anneal, has_kernel
from p2p_dtfm.core.paper_cost import PaperProblem, data_parallel_ns, path_ns
from p2p_dtfm.core.paper_solver import kinds_of, solve_paper
from p2p_dtfm.sim.files import read_scenario
from p2p_dtfm.sim.paper_scenario import paper_problem_of

CASES = {
    "paper-1-data-center": 3.439799,
    "paper-2-spot": 43.54734,
    "paper-3-two-sites": 16.08684,
    "paper-4-regional": 34.802041,
    "paper-5-world-wide": 49.21838,
}
CASE_LIMIT_S, INSTANCE_LIMIT_S, GAP_LIMIT = 2.0, 5.0, 0.01


def timed(problem: PaperProblem) -> tuple[float, float]:
    """(seconds of cost, seconds of this process)."""
    began = time.process_time()
    found = solve_paper(problem)
    return found.total_ns / 1e9, time.process_time() - began


def region_order_s(problem: PaperProblem) -> float:
    size = problem.replica_count
    groups = tuple(tuple(range(at * size, (at + 1) * size)) for at in range(problem.stage_count))
    return (data_parallel_ns(problem, groups) + 2 * path_ns(problem, groups)) / 1e9


def annealed_s(problem: PaperProblem, seed: int, moves: int) -> float:
    """Plain annealing from a random placement, 2 s down to 20 ms."""
    start = list(range(problem.peer_count))
    random.Random(seed).shuffle(start)
    levels = 300
    factor = round(0.01 ** (1 / levels) * Q20)
    cost, _ = anneal(
        problem, kinds_of(problem), tuple(start), seed, 2 * 10**9, factor, levels, moves // levels
    )
    return cost / 1e9


def long_search_s(problem: PaperProblem, quick: bool) -> float:
    moves = 300_000 if quick else 3_000_000
    found = [annealed_s(problem, seed, moves) for seed in range(2 if quick else 4)]
    found.append(solve_paper(problem, effort=2 if quick else 10).total_ns / 1e9)
    return min(found)


def case_rows() -> list[dict[str, object]]:
    rows = []
    for name, known in CASES.items():
        cost, elapsed = timed(paper_problem_of(read_scenario(name), 8, 8))
        rows.append(
            {
                "case": name,
                "known_s": known,
                "found_s": cost,
                "elapsed_s": round(elapsed, 2),
                "ok": cost <= known * (1 + 1e-4) and elapsed <= CASE_LIMIT_S,
            }
        )
    return rows


def instance_rows(count: int, quick: bool) -> list[dict[str, object]]:
    rows = []
    for seed in range(count):
        problem = paper_problem_of(uneven_cities(seed), 8, 8)
        cost, elapsed = timed(problem)
        best = min(cost, long_search_s(problem, quick))
        rows.append(
            {
                "instance": seed,
                "region_s": region_order_s(problem),
                "annealed_s": annealed_s(problem, 1, 200_000),
                "found_s": cost,
                "long_search_s": best,
                "gap": cost / best - 1,
                "elapsed_s": round(elapsed, 2),
                "ok": cost <= best * (1 + GAP_LIMIT) and elapsed <= INSTANCE_LIMIT_S,
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    assert has_kernel(), "the kernel is missing: install a C compiler, then pip install -e ."
    result = {
        "cases": case_rows(),
        "instances": instance_rows(3 if arguments.quick else arguments.instances, arguments.quick),
    }
    if arguments.json:
        print(json.dumps(result))
        return
    for rows in result.values():
        print("  ".join(f"{key:>20}" for key in rows[0]))
        for row in rows:
            print("  ".join(f"{_shown(value):>20}" for value in row.values()))


def _shown(value: object) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    main()
