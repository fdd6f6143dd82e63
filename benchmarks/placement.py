"""Our plans against the alternatives, under the simulator, on random swarms.

    python -m benchmarks.placement [--scenarios 100] [--first-seed 0] [--out FILE] [--quick]

Each alternative may choose its own depth (paper: 2, 4 and 8 stages), with our cuts, microbatches
and in-flight depths. Of its placements the five that our cost model likes best are simulated, and
the fastest of those counts. So what is compared is the placement alone, which makes the
alternatives stronger than their originals.

- region: peers in file order, cut into runs
- paper: DT-FM's optimum, its matchings chained into pipelines
- random: the best of 1,000 random orders
- greedy: a chain of nearest neighbours, cut into runs

`ratio` is our simulated seconds a step over the alternative's. `--out` keeps a line of JSON for
each scenario; one that has a line already is not done again.
"""

import argparse
import heapq
import itertools
import json
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.initial_placements import nearest_chain, runs
from p2p_dtfm.core.planner.planner import compute_plan, plan_of
from p2p_dtfm.core.planner.search import rank
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of
from p2p_dtfm.sim.paper.solver import solve_paper
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.random_swarms import mixed_swarm
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

RANDOM_ORDERS = 1000
TARGET_RATIO = 1.0
SIMULATED = 5
"""How many of each alternative's placements are simulated."""
PAPER_DEPTHS = (2, 4, 8)
QUICK_SCENARIOS, QUICK_PEERS = 4, 16
"""With `--quick`: how many swarms are compared, and the size of the largest."""


def cheapest(model: StepModel, placements: Iterator[Placement]) -> list[PlacementCost]:
    """The distinct placements that the cost model likes best, cheapest first."""
    costs = (model.cost(placement) for placement in placements)
    distinct = {cost.placement: cost for cost in costs if cost is not None}
    return heapq.nsmallest(SIMULATED, distinct.values(), key=rank)


def every_depth(model: StepModel, order: list[int]) -> Iterator[Placement]:
    """Placements of all peers, or of as many as make equal pipelines."""
    for stages in range(1, min(len(order), model.problem.layer_count) + 1):
        pipelines = len(order) // stages
        yield runs(order, pipelines)
        if pipelines * stages < len(order):
            yield runs(order[: pipelines * stages], pipelines)


def random_placements(model: StepModel, seed: int) -> Iterator[Placement]:
    chance = random.Random(seed)
    count = model.problem.peer_count
    for _ in range(RANDOM_ORDERS):
        order = list(range(count))
        chance.shuffle(order)
        stages = chance.randint(1, min(count, model.problem.layer_count))
        yield runs(order, max(1, count // stages))


def paper_placements(scenario: Scenario, numbers: dict[str, int]) -> Iterator[Placement]:
    names = tuple(peer.name for peer in scenario.peers)
    for stages in PAPER_DEPTHS:
        replicas = len(names) // stages
        if replicas:
            part = scenario.with_peers(names[: stages * replicas])
            found = solve_paper(paper_problem_of(part, stages, replicas))
            yield tuple(tuple(numbers[name] for name in p) for p in found.pipelines)


def alternatives(
    scenario: Scenario, snapshot: Snapshot, seed: int
) -> dict[str, list[PlacementCost]]:
    problem = problem_of(snapshot)
    model = StepModel(problem)
    numbers = {name: at for at, name in enumerate(problem.peer_ids)}
    region = [numbers[peer.name] for peer in scenario.peers]
    return {
        "region": cheapest(model, every_depth(model, region)),
        "paper": cheapest(model, paper_placements(scenario, numbers)),
        "random": cheapest(model, random_placements(model, seed)),
        "greedy": cheapest(model, every_depth(model, nearest_chain(problem, region))),
    }


def compared(seed: int) -> dict[str, object] | None:
    """One scenario; None where no plan exists."""
    scenario = mixed_swarm(seed)
    chance = random.Random(f"run {seed}")
    layers, batch = chance.choice([12, 24]), chance.choice([128, 256, 512, 1024])
    spec = read_run_spec("gpt3-xl", layers, batch)
    snapshot = scenario_snapshot(scenario, spec)
    workload = workload_in(scenario, spec, OURS)
    began = time.process_time()
    plan = compute_plan(snapshot)
    elapsed = time.process_time() - began
    if isinstance(plan, NoPlan):
        return None
    ours_ns = simulate_step(plan, scenario, workload, OURS).total_ns
    ratios = {}
    problem = problem_of(snapshot)
    for name, costs in alternatives(scenario, snapshot, seed).items():
        others = [plan_of(problem, cost) for cost in costs]
        times = [simulate_step(other, scenario, workload, OURS).total_ns for other in others]
        if times:
            ratios[name] = ours_ns / min(times)
    return {
        "seed": seed,
        "peers": len(scenario.peers),
        "simulated_s": ours_ns / 1e9,
        "predicted_over_simulated": plan.predicted_step_ns / ours_ns,
        "planned_s": round(elapsed, 2),
        "ratios": ratios,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scenarios", type=int, default=100)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="lines of JSON, one for each scenario")
    parser.add_argument("--quick", action="store_true", help="four swarms of up to 16 peers")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    done = _lines_of(arguments.out)
    rows = []
    for seed in _seeds(arguments.first_seed, arguments.scenarios, arguments.quick):
        row = done[seed] if seed in done else compared(seed)
        if arguments.out and seed not in done:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"seed": seed, "row": row}) + "\n")
        if row is not None:
            rows.append(row)
            if not arguments.json:
                print(_line(row), flush=True)
    summary = _summary(rows)
    if arguments.json:
        met = summary["best of all"]["worst"] <= TARGET_RATIO
        print(json.dumps({"rows": rows, "summary": summary, "target": TARGET_RATIO, "met": met}))
        return
    for name, figures in summary.items():
        print(f"{name:>10}  " + "  ".join(f"{key} {value:.3f}" for key, value in figures.items()))


def _seeds(first: int, count: int, quick: bool) -> Iterator[int]:
    """So many seeds from `first` on, or the first few whose swarms are small."""
    if not quick:
        yield from range(first, first + count)
        return
    small = (s for s in itertools.count(first) if len(mixed_swarm(s).peers) <= QUICK_PEERS)
    yield from itertools.islice(small, QUICK_SCENARIOS)


def _lines_of(path: Path | None) -> dict[int, dict[str, object] | None]:
    """The rows of an earlier run by seed; None for a scenario that has no plan."""
    if path is None or not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["seed"]: line["row"] for line in lines}


def _summary(rows: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    summary = {}
    for name in ("region", "paper", "random", "greedy"):
        ratios = [row["ratios"][name] for row in rows if name in row["ratios"]]
        summary[name] = {
            "mean": statistics.mean(ratios),
            "worst": max(ratios),
            "scenarios": float(len(ratios)),
        }
    best = [max(row["ratios"].values(), default=0.0) for row in rows]
    summary["best of all"] = {"mean": statistics.mean(best), "worst": max(best)}
    accuracy = [row["predicted_over_simulated"] for row in rows]
    summary["prediction"] = {"least": min(accuracy), "most": max(accuracy)}
    return summary


def _line(row: dict[str, object]) -> str:
    ratios = "  ".join(f"{name} {ratio:.3f}" for name, ratio in row["ratios"].items())
    return (
        f"{row['seed']:>4}  {row['peers']:>3} peers  {row['simulated_s']:8.2f} s  "
        f"predicted/simulated {row['predicted_over_simulated']:.3f}  planned in "
        f"{row['planned_s']:.2f} s  {ratios}"
    )


if __name__ == "__main__":
    main()
