"""The rows that take time, each by itself, so that they can be told, kept and taken up again."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.built_starts import Packer
from p2p_dtfm.sim.paper.named_plans import (
    grid_plan,
    paper_order,
    random_orders,
    region_order,
    within_memory,
)
from p2p_dtfm.sim.paper.published import SCENARIOS, STAGES
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of, sizes_of
from p2p_dtfm.sim.paper.solver import solve_paper
from p2p_dtfm.sim.reproduction.bars import LINK_EFFICIENCY
from p2p_dtfm.sim.reproduction.convergence import CASES, METHODS, SEEDS, case_problem, curve_of
from p2p_dtfm.sim.reproduction.price_rows import (
    WORTH_IT,
    PriceRow,
    price_row,
    swarms_by_price,
    worth_row,
)
from p2p_dtfm.sim.reproduction.simulated_rows import RUN, dtfm_seconds_by_batch
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.random_swarms import large_swarm
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import on_the_wire, scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

PRICED = "spot-and-on-demand"
LAYERS = (24, 32, 40)
BATCHES = (1024, 2048, 4096)
SCALE = {8: 1024, 16: 1024, 32: 1024, 64: 1024, 128: 2048, 256: 2048, 512: 4096, 1024: 4096}
"""Sequences of a step for each number of peers."""


@dataclass(frozen=True, slots=True)
class Task:
    """One row or a few. `make` gives plain values, as they are kept in files."""

    key: str
    told: str
    quick: bool
    """Whether it takes so little time that `--quick` does it, too."""
    make: Callable[[], Any]


def tasks() -> list[Task]:
    """All tasks, the shortest first."""
    return [
        *_dtfm_tasks(),
        *_level_tasks(),
        *_scheduler_tasks(),
        *_price_tasks(),
        *_our_tasks(),
        *_curve_tasks(),
        *_scale_tasks(),
    ]


def _dtfm_tasks() -> list[Task]:
    def make(case: str, placement: str, layers: int) -> dict[str, float]:
        scenario = read_scenario(SCENARIOS[case])
        found = dtfm_seconds_by_batch(scenario, placement, layers, BATCHES)
        return {str(batch): seconds for batch, seconds in found.items()}

    return [
        Task(
            f"dtfm {case} {placement} {layers}",
            f"DT-FM in case {case}, {placement} order, {counted(layers, 'layer')}",
            True,
            partial(make, case, placement, layers),
        )
        for case in SCENARIOS
        for placement in ("region", "random")
        for layers in LAYERS
    ]  # fmt: skip


def case_scenario(case: str) -> Scenario:
    """The network of a case as our own rows have it."""
    return read_scenario(SCENARIOS[case]).with_link_efficiency(LINK_EFFICIENCY)


def _our_tasks() -> list[Task]:
    def make(case: str, layers: int, batch: int) -> dict[str, float]:
        scenario = case_scenario(case)
        spec = read_run_spec(RUN, layers, batch)
        plan = compute_plan(scenario_snapshot(scenario, spec))
        assert not isinstance(plan, NoPlan), plan.reason
        step = simulate_step(plan, scenario, workload_in(scenario, spec, OURS), OURS)
        return {
            "simulated_s": step.total_ns / 1e9,
            "predicted_s": plan.predicted_step_ns / 1e9,
        }

    return [
        Task(
            f"ours {case} {layers} {batch}",
            f"our plan in case {case}, {counted(layers, 'layer')}, {batch} sequences",
            False,
            partial(make, case, layers, batch),
        )
        for case in SCENARIOS
        for layers in LAYERS
        for batch in BATCHES
    ]  # fmt: skip


def _level_tasks() -> list[Task]:
    """Tasks that take seconds with the compiled kernel and many minutes without, so their rows come
    along."""

    def make(case: str) -> list[list[int]]:
        problem = case_problem(case)
        at = {name: number for number, name in enumerate(problem.peer_ids)}
        return [[at[name] for name in group] for group in solve_paper(problem).stages]

    return [
        Task(f"levels {case}", f"the two levels of case {case}", False, partial(make, case))
        for case in CASES
    ]


def priced_swarms() -> list[tuple[str, Scenario]]:
    """All peers of the packaged scenario that has prices, and those of each price."""
    return list(swarms_by_price(read_scenario(PRICED)))


def _price_tasks() -> list[Task]:
    spec = read_run_spec(RUN)

    def make(swarm: Scenario) -> PriceRow:
        row = price_row(swarm, spec)
        assert row is not None, f"no plan of {swarm.name}"
        return row

    rows = [(name, partial(make, swarm)) for name, swarm in priced_swarms()]
    rows.append((WORTH_IT, partial(worth_row, read_scenario(PRICED), spec)))
    return [Task(f"price {name}", f"prices: {name}", False, made) for name, made in rows]


def _scheduler_tasks() -> list[Task]:
    def make(case: str) -> dict[str, float]:
        scenario = case_scenario(case)
        workload = workload_in(scenario, read_run_spec(RUN, LAYERS[0], BATCHES[0]), OURS)

        def seconds(order: tuple[str, ...]) -> float:
            plan = within_memory(grid_plan(order, workload, STAGES), scenario, workload)
            return _simulated_s(plan, scenario, workload)

        sizes = sizes_of(RUN, on_the_wire(workload, OURS))
        problem = paper_problem_of(scenario, STAGES, len(scenario.peers) // STAGES, sizes)
        chain = Packer(problem).chain(list(range(problem.peer_count)))
        return {
            "region order": seconds(region_order(scenario)),
            "random ranks": statistics.median(map(seconds, random_orders(scenario, 0))),
            "greedy chain": seconds(tuple(problem.peer_ids[peer] for peer in chain)),
            "optimum of DT-FM's cost": seconds(paper_order(scenario, STAGES, sizes)),
        }

    return [
        Task(
            f"scheduler {case}",
            f"other placements in case {case}",
            False,
            partial(make, case),
        )
        for case in SCENARIOS
    ]  # fmt: skip


def _simulated_s(plan: Plan, scenario: Scenario, workload: Workload) -> float:
    return simulate_step(plan, scenario, workload, OURS).total_ns / 1e9


def _curve_tasks() -> list[Task]:
    return [
        Task(
            f"curve {case} {method} {seed}",
            f"{method} in case {case}, seed {seed}",
            False,
            partial(curve_of, case, method, seed),
        )
        for case in CASES
        for method in METHODS
        for seed in range(SEEDS)
    ]  # fmt: skip


def _scale_tasks() -> list[Task]:
    def make(count: int) -> dict[str, float]:
        snapshot = scenario_snapshot(large_swarm(count), read_run_spec(RUN, 24, SCALE[count]))
        began = time.process_time()
        plan = compute_plan(snapshot)
        planned_s = time.process_time() - began
        assert not isinstance(plan, NoPlan), plan.reason
        bound_ns = step_lower_bound_ns(problem_of(snapshot))
        return {
            "planned_s": planned_s,
            "step_s": plan.predicted_step_ns / 1e9,
            "over_bound": plan.predicted_step_ns / bound_ns,
        }

    return [
        Task(f"scale {count}", f"a plan for {counted(count, 'peer')}", False, partial(make, count))
        for count in SCALE
    ]
