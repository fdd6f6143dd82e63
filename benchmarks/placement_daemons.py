"""Placement pays, on real daemons: the same swarm and engine with our plan and with others.

    python -m benchmarks.placement_daemons [--scenario NAME ...] [--steps N] [--quick] [--json]

Daemons with emulated devices over shaped links; only the plan differs
(`benchmarks.daemon_with_plan`):

- ours: the planner's, from the scenario's own figures
- region: peers in file order, cut into a grid of equal stages
- random: the same with a random order, the median one of three as simulated
- dtfm: DT-FM's optimum as a grid, carried out with its order (GPipe, flushed as often as memory
  asks for) and flat reduction; but over our streams, and not over its communicator

Beside each measured step stand the simulator's and the time that no plan can beat. The last row is
the paper's own world-wide case, 64 peers, which no one machine can play: it is simulated only, with
DT-FM's execution as its measurements show it (docs/simulator.md).
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.command_line import conclude, parse_options
from benchmarks.emulated_swarm import (
    EXECUTION,
    LABEL,
    emulated_spec,
    play,
    scenario_file,
    shape_of_plan,
)
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.paper.named_plans import (
    default_stages,
    dtfm_order,
    grid_plan,
    paper_order,
    random_orders,
    region_order,
    within_memory,
)
from p2p_dtfm.sim.scenario.execution import DTFM, OURS
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

KINDS = ("ours", "region", "random", "dtfm")
PAPER = "paper-5-world-wide-as-run"
SCENARIO_NAMES = ("uneven-homes", "straggler", "small-world")
TARGETS = {
    ("uneven-homes", "region"): 2.0,
    ("straggler", "region"): 2.0,
    (PAPER, "dtfm"): 2.5,
}
STAGES = 4


def plan_named(kind: str, scenario: Scenario, spec: RunSpec) -> Plan:
    """The plan of that kind, by the scenario's names."""
    workload = workload_in(scenario, spec, EXECUTION)
    if kind == "ours":
        plan = compute_plan(scenario_snapshot(scenario, spec, EXECUTION))
        assert not isinstance(plan, NoPlan), plan.reason
        return plan
    stages = min(STAGES, len(scenario.peers))
    if kind == "dtfm":
        plan = grid_plan(paper_order(scenario, stages), workload, stages)
        return flushed(within_memory(plan, scenario, workload))
    orders = [region_order(scenario)] if kind == "region" else random_orders(scenario, 0)
    plans = [grid_plan(order, workload, stages) for order in orders]
    fitting = [within_memory(plan, scenario, workload) for plan in plans]
    fitting.sort(key=lambda plan: simulated_ns(plan, scenario, spec, kind))
    return fitting[len(fitting) // 2]


def flushed(plan: Plan) -> Plan:
    """The plan with as many microbatches in flight everywhere as the stage with the least room
    holds."""
    least = min(stage.in_flight for pipeline in plan.pipelines for stage in pipeline.stages)
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(
                msgspec.structs.replace(stage, in_flight=least) for stage in pipeline.stages
            ),
        )
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines)


def simulated_ns(plan: Plan, scenario: Scenario, spec: RunSpec, kind: str) -> int:
    execution = EXECUTION
    if kind == "dtfm":
        flush = plan.pipelines[0].stages[0].in_flight
        execution = replace(EXECUTION, order="gpipe", reduction="flat", flush_microbatches=flush)
    workload = workload_in(scenario, spec, execution)
    return simulate_step(plan, scenario, workload, execution).total_ns


def measure(
    scenario: Scenario, spec: RunSpec, steps: int, kind: str, simulate_only: bool
) -> dict[str, Any]:
    """One row."""
    plan = plan_named(kind, scenario, spec)
    row = {
        "scenario": scenario.name,
        "kind": kind,
        "plan": shape_of_plan(plan),
        "bound_s": step_lower_bound_ns(problem_of(scenario_snapshot(scenario, spec, EXECUTION)))
        / 1e9,
        "simulated_s": simulated_ns(plan, scenario, spec, kind) / 1e9,
    }
    if not simulate_only:
        with tempfile.TemporaryDirectory(prefix="p2p-dtfm-placement-") as name:
            execution = "gpipe" if kind == "dtfm" else ""
            played = play(scenario, steps, Path(name), spec, plan, execution)
        names = [s.peer_id for p in played.plan.pipelines for s in p.stages]
        assert names == [s.peer_id for p in plan.pipelines for s in p.stages], "another plan ran"
        row["measured_s"] = statistics.median(played.step_s)
        row["steps_s"] = [round(each, 3) for each in played.step_s]
    return {
        key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()
    }


def paper_rows() -> list[dict[str, Any]]:
    """The paper's own case, 24 layers and 1,024 sequences, in virtual time."""
    scenario, spec = read_scenario(PAPER), read_run_spec("gpt3-xl")
    rows = []
    for kind in ("ours", "region", "dtfm"):
        execution = DTFM if kind == "dtfm" else OURS
        workload = workload_in(scenario, spec, execution)
        stages = default_stages(len(scenario.peers), workload.block_count)
        if kind == "ours":
            plan = compute_plan(scenario_snapshot(scenario, spec))
            assert not isinstance(plan, NoPlan), plan.reason
        elif kind == "region":
            grid = grid_plan(region_order(scenario), workload, stages)
            plan = within_memory(grid, scenario, workload)
        else:
            plan = grid_plan(dtfm_order(scenario, stages), workload, stages)
        step = simulate_step(plan, scenario, workload, execution)
        bound_ns = step_lower_bound_ns(problem_of(scenario_snapshot(scenario, spec)))
        rows.append(
            {
                "scenario": PAPER,
                "kind": kind,
                "plan": f"{len(plan.pipelines)} x {len(plan.pipelines[0].stages)}",
                "bound_s": round(bound_ns / 1e9, 3),
                "simulated_s": round(step.total_ns / 1e9, 3),
            }
        )
    return rows


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the targets of the scenarios that ran are met."""
    seconds = [row.get("measured_s", row["simulated_s"]) for row in rows]
    ours = {r["scenario"]: s for r, s in zip(rows, seconds, strict=True) if r["kind"] == "ours"}
    misses = []
    for row, second in zip(rows, seconds, strict=True):
        row["over_ours"] = round(second / ours[row["scenario"]], 2)
        target = TARGETS.get((row["scenario"], row["kind"]), 0.0)
        row["target"] = target or None
        if row["over_ours"] < target:
            misses.append(row)
    return conclude({"label": LABEL, "rows": rows}, _table(rows), "targets", not misses, as_json)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{LABEL}; seconds for a step"
    yield (
        f"{'scenario':25s} {'plan':7s} {'':14s} {'bound':>6s} {'simulated':>9s} {'measured':>8s} "
        f"{'over ours':>9s} target"
    )
    for row in rows:
        measured = f"{row['measured_s']:8.2f}" if "measured_s" in row else " " * 8
        yield (
            f"{row['scenario']:25s} {row['kind']:7s} {row['plan']:14s} {row['bound_s']:6.2f} "
            f"{row['simulated_s']:9.2f} {measured} {row['over_ours']:9.2f} {row['target'] or ''}"
        )


def main() -> int:
    options = parse_options(__doc__, 4, "only simulate", SCENARIO_NAMES, KINDS)
    spec = emulated_spec()
    rows = [
        measure(scenario_file(name), spec, options.steps, kind, options.quick)
        for name in options.scenario
        for kind in KINDS
        if kind == "ours" or kind in options.kind
    ]
    return report([*rows, *paper_rows()], options.json)


if __name__ == "__main__":
    raise SystemExit(main())
