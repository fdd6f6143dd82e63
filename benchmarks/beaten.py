"""Seconds per step of our plan and execution on the paper's networks, next to what was measured.

    python -m benchmarks.beaten [--only PART] [--quick] [--json]

The same compute rate, fp16, synchronous, no lossy codec; links at 85% of their stated rates.
`bound` is what computing alone takes when all 64 peers share it evenly; `grid` is the least that
any grid can take, by filling and draining, reduction and commit besides (`core/planner/bound.py`).
Writes beaten.json.
"""

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import msgspec

from benchmarks.paper_rows import measured_rows, paper_spec
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import grid_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.sim.paper.named_plans import grid_plan, region_order, within_memory
from p2p_dtfm.sim.paper.published import SCENARIOS
from p2p_dtfm.sim.scenario.execution import OURS, Execution
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import flops_of, scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

LINK_EFFICIENCY = 0.85
SHARED_CARD_BYTES_PER_S = 1_250_000_000
ROWS = ((24, 1024), (24, 4096), (40, 4096))
TARGETS_S = {("5", 24, 1024): 12.0, ("5", 24, 4096): 34.0, ("5", 40, 4096): 55.0}
IN_FLIGHT = (1.0, 1.5, 2.0, 2.5, 3.0, 4.0)


def scenario_of(case: str, shared_card: bool) -> Scenario:
    """A case's network at 85%. Either all of a peer's links share a 10 Gbit/s card, or no card
    limits them."""
    scenario = read_scenario(SCENARIOS[case])
    if shared_card:
        rate = SHARED_CARD_BYTES_PER_S
        peers = tuple(
            replace(peer, uplink_bytes_per_s=rate, downlink_bytes_per_s=rate)
            for peer in scenario.peers
        )
        scenario = replace(scenario, peers=peers)
    return scenario.with_link_efficiency(LINK_EFFICIENCY)


def bound_s(scenario: Scenario, layers: int, batch: int, execution: Execution) -> float:
    workload = workload_in(scenario, paper_spec(layers, batch), execution)
    flops = sum(flops_of(peer) for peer in scenario.peers)
    forward_s = layers * workload.block.forward_flops * batch / flops
    return forward_s * (1 + execution.backward_forwards)


def grid_bound_s(scenario: Scenario, layers: int, batch: int, execution: Execution) -> float:
    snapshot = scenario_snapshot(scenario, paper_spec(layers, batch), execution)
    bound_ns = grid_lower_bound_ns(problem_of(snapshot))
    assert bound_ns is not None, "a grid holds the model"
    return bound_ns / 1e9


def our_plan(scenario: Scenario, layers: int, batch: int, execution: Execution) -> Plan:
    plan = compute_plan(scenario_snapshot(scenario, paper_spec(layers, batch), execution))
    assert not isinstance(plan, NoPlan), plan.reason
    return plan


def compare(case: str, layers: int, batch: int, recompute: bool, shared_card: bool) -> dict:
    """One line of the table."""
    scenario = scenario_of(case, shared_card)
    execution = replace(OURS, recompute=recompute)
    workload = workload_in(scenario, paper_spec(layers, batch), execution)
    plan = our_plan(scenario, layers, batch, execution)
    step = simulate_step(plan, scenario, workload, execution)
    grid = within_memory(grid_plan(region_order(scenario), workload, 8), scenario, workload)
    return {
        "case": case,
        "layers": layers,
        "batch": batch,
        "recompute": recompute,
        "shared_card": shared_card,
        "bound_s": bound_s(scenario, layers, batch, execution),
        "grid_bound_s": grid_bound_s(scenario, layers, batch, execution),
        "ours_s": step.total_ns / 1e9,
        "predicted_s": plan.predicted_step_ns / 1e9,
        "compute_s": step.compute_ns / 1e9,
        "waiting_s": step.waiting_ns / 1e9,
        "fill_and_drain_s": step.fill_and_drain_ns / 1e9,
        "reduction_s": step.reduction_ns / 1e9,
        "commit_s": step.commit_ns / 1e9,
        "region_order_s": simulate_step(grid, scenario, workload, execution).total_ns / 1e9,
        "pipelines": len(plan.pipelines),
        "stages": max(len(pipeline.stages) for pipeline in plan.pipelines),
        "target_s": TARGETS_S.get((case, layers, batch)),
    }


def in_flight_sweep() -> list[dict]:
    """Case 5, L24 B1024, 8 stages in region order: the effect of the number in flight."""
    scenario = scenario_of("5", shared_card=False)
    workload = workload_in(scenario, paper_spec(24, 1024), OURS)
    plan = grid_plan(region_order(scenario), workload, 8)
    table = []
    for factor in IN_FLIGHT:
        pipelines = tuple(
            msgspec.structs.replace(
                pipeline,
                stages=tuple(
                    msgspec.structs.replace(stage, in_flight=round(factor * (8 - position)))
                    for position, stage in enumerate(pipeline.stages)
                ),
            )
            for pipeline in plan.pipelines
        )
        deep = msgspec.structs.replace(plan, pipelines=pipelines)
        step = simulate_step(deep, scenario, workload, OURS)
        table.append({"times_textbook": factor, "seconds": step.total_ns / 1e9})
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("beaten.json"))
    parser.add_argument(
        "--only", choices=["recompute", "card", "plain"], help="one of the table's parts"
    )
    parser.add_argument("--case", nargs="*", choices=list(SCENARIOS), default=list(SCENARIOS))
    parser.add_argument("--quick", action="store_true", help="the world-wide case, recomputing")
    parser.add_argument("--json", action="store_true", help="print what --out gets, no table")
    options = parser.parse_args()
    with contextlib.redirect_stdout(sys.stderr if options.json else sys.stdout):
        figures = compared(options)
    options.out.write_text(json.dumps(figures, indent=1) + "\n")
    if options.json:
        print(json.dumps(figures))


def compared(options: argparse.Namespace) -> dict[str, object]:
    """All lines, printed as they are found."""
    cases = options.case[-1:] if options.quick else options.case
    only = "recompute" if options.quick else options.only
    measured = {
        (row.case, row.layers, row.batch): row.measured_s
        for row in measured_rows()
        if row.placement == "region"
    }
    lines = []
    print(
        "case row          recompute card   DT-FM  bound   grid   ours (region order)  x bound"
        "  x grid  target"
    )
    parts = {"recompute": (False, True), "card": (True, True), "plain": (False, False)}
    for part, (shared_card, recompute) in parts.items():
        if only in (None, part):
            for case in cases:
                for layers, batch in ROWS:
                    line = compare(case, layers, batch, recompute, shared_card)
                    line["dtfm_measured_s"] = measured.get((case, layers, batch))
                    lines.append(line)
                    print(
                        f"{case:4s} L{layers} B{batch:5d} {'yes' if recompute else 'no ':9s} "
                        f"{'10G' if shared_card else '-':5s} {line['dtfm_measured_s'] or '':>6} "
                        f"{line['bound_s']:6.2f} {line['grid_bound_s']:6.2f} "
                        f"{line['ours_s']:6.2f} ({line['region_order_s']:6.2f}) "
                        f"{line['ours_s'] / line['bound_s']:12.2f} "
                        f"{line['ours_s'] / line['grid_bound_s']:7.2f}  {line['target_s'] or ''}",
                        flush=True,
                    )
    sweep = in_flight_sweep() if "5" in options.case else []
    for point in sweep:
        print(f"in flight {point['times_textbook']:.1f} x textbook: {point['seconds']:.2f} s")
    return {"rows": lines, "in_flight": sweep}


if __name__ == "__main__":
    main()
