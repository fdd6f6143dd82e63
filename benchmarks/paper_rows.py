"""The paper's measured rows, and the simulator's time for each of them under DT-FM's execution."""

import json
import statistics
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.paper.named_plans import grid_plan, random_orders, region_order
from p2p_dtfm.sim.scenario.execution import Communicator, execution_named
from p2p_dtfm.sim.scenario.scenario import Scenario, load_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

ROOT = Path(__file__).parents[1]
STAGES = 8
SCENARIOS = {
    "1": "paper-1-data-center",
    "3": "paper-3-two-sites",
    "5": "paper-5-world-wide-as-run",
}
PLACEMENTS = {"DT-FM scheduled": "region", "DT-FM random": "random"}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure."""

    case: str
    layers: int
    batch: int
    placement: str
    measured_s: float

    @property
    def name(self) -> str:
        return f"case {self.case} L{self.layers} B{self.batch} {self.placement}"


def measured_rows() -> list[Row]:
    """The rows of DT-FM scheduled and DT-FM random."""
    cases = json.loads((ROOT / "benchmarks/dtfm_measured.json").read_text())["cases"]
    rows = []
    for case, table in cases.items():
        for title, placement in PLACEMENTS.items():
            for key, figures in table.items():
                layers, batch = (int(part[1:]) for part in key.split())
                rows.append(Row(case, layers, batch, placement, figures[title]))
    return rows


def paper_scenario(case: str) -> Scenario:
    return load_scenario(ROOT / "configs/scenarios" / f"{SCENARIOS[case]}.toml")


def paper_spec(layers: int, batch: int) -> RunSpec:
    """DT-FM's GPT-3 XL with so many layers and sequences."""
    values = tomllib.loads((ROOT / "benchmarks/gpt3-xl-dtfm.toml").read_text())
    values["model"]["layers"] = layers
    values["batch"]["global_batch"] = batch
    return parse_run_spec(values, "benchmarks/gpt3-xl-dtfm.toml")


def with_forward_flops(scenario: Scenario, flops: int) -> Scenario:
    """All peers at another compute rate."""
    peers = tuple(replace(peer, forward_flops=flops) for peer in scenario.peers)
    return replace(scenario, peers=peers)


def dtfm_times_s(
    scenario: Scenario, placement: str, layers: int, batch: int, communicator: Communicator
) -> list[tuple[float, float]]:
    """(seconds until all backwards are done, seconds of reduction after them) of each run.

    Random placement has three runs, region order one.
    """
    orders = random_orders(scenario, 0) if placement == "random" else [region_order(scenario)]
    execution = replace(execution_named("dtfm", layers), communicator=communicator)
    workload = workload_in(scenario, paper_spec(layers, batch), execution)
    times = []
    for order in orders:
        plan = grid_plan(order, workload, STAGES)
        step = simulate_step(plan, scenario, workload, execution)
        times.append((step.pipelines_done_ns / 1e9, step.reduction_ns / 1e9))
    return times


def dtfm_time_s(row: Row, scenario: Scenario, communicator: Communicator) -> float:
    """Simulated seconds of a row; of random placement the median run, as the table has it."""
    runs = dtfm_times_s(scenario, row.placement, row.layers, row.batch, communicator)
    return statistics.median(map(sum, runs))
