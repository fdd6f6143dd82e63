"""Prediction: how long a step really takes, against what its plan says.

    python -m benchmarks.prediction [--scenario NAME ...] [--steps N] [--quick] [--json]

For each of six scenarios eight real daemons (four in `unlike-layers`, whose blocks have two
widths), with emulated devices over shaped links, measure one another, agree on a plan, and train:
real protocol, real bytes, real waiting, no real computing.
Measured is the median step of their last view, and best the fastest: other programs on the machine
only add to a step. Predicted is what the plan in force says, made from
what they had measured themselves; simulated what `sim.step_time.simulator` makes of the same plan
and the scenario's own figures. Lower bound beside them: no plan at all is faster
(`core.planner.bound`).
"""

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.command_line import conclude, parse_options
from benchmarks.emulated_swarm import (
    EXECUTION,
    LABEL,
    Played,
    emulated_spec,
    four_of,
    play,
    scenario_file,
    shape_of_plan,
    unlike_spec,
)
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

SCENARIO_NAMES = ("one-room", "two-labs", "uneven-homes", "straggler", "small-world")
UNLIKE = "unlike-layers"
UNLIKE_IN = "uneven-homes"
WORST_TARGET = 0.15
MEDIAN_TARGET = 0.08


def measure(scenario: Scenario, steps: int, spec: RunSpec) -> dict[str, Any]:
    """One row."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-prediction-") as name:
        return {
            **row_of(play(scenario, steps, Path(name), spec)),
            "elapsed_s": round(time.monotonic() - began_s, 1),
        }


def row_of(played: Played) -> dict[str, Any]:
    """Measured, predicted and simulated seconds of a step, and how far the first two differ."""
    workload = workload_in(played.scenario, played.spec, EXECUTION)
    simulated = simulate_step(played.plan, played.scenario, workload, EXECUTION)
    measured_s = statistics.median(played.step_s)
    predicted_s = played.plan.predicted_step_ns / 1e9
    return {
        "scenario": played.scenario.name,
        "peers": len(played.scenario.peers),
        "plan": shape_of_plan(played.plan),
        "steps_s": [round(each, 3) for each in played.step_s],
        "measured_s": round(measured_s, 3),
        "best_s": round(min(played.step_s), 3),
        "predicted_s": round(predicted_s, 3),
        "simulated_s": round(simulated.total_ns / 1e9, 3),
        "bound_s": _bound_s(played),
        "error": round(measured_s / predicted_s - 1, 4),
    }


def _bound_s(played: Played) -> float | None:
    """The lower bound. None where layers are unlike, as no bound is known there."""
    if played.spec.layers:
        return None
    return round(step_lower_bound_ns(problem_of(played.snapshot)) / 1e9, 3)


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if both targets are met."""
    errors = [abs(row["error"]) for row in rows]
    worst, median = max(errors), statistics.median(errors)
    met = worst <= WORST_TARGET and median <= MEDIAN_TARGET
    figures = {
        "label": LABEL,
        "scenarios": rows,
        "worst_error": worst,
        "median_error": median,
        "targets": {"worst_error": WORST_TARGET, "median_error": MEDIAN_TARGET},
    }
    verdict = (
        f"worst {worst:.1%} (target {WORST_TARGET:.0%}), "
        f"median {median:.1%} (target {MEDIAN_TARGET:.0%})"
    )
    return conclude(figures, _table(rows), verdict, met, as_json)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{LABEL}; seconds for a step"
    yield (
        f"{'scenario':14s} {'plan':14s} {'bound':>7s} {'simulated':>9s} {'predicted':>9s} "
        f"{'measured':>8s} {'error':>7s} {'best':>6s}"
    )
    for row in rows:
        bound = "-" if row["bound_s"] is None else f"{row['bound_s']:.2f}"
        yield (
            f"{row['scenario']:14s} {row['plan']:14s} {bound:>7s} "
            f"{row['simulated_s']:9.2f} {row['predicted_s']:9.2f} {row['measured_s']:8.2f} "
            f"{row['error']:7.1%} {row['best_s']:6.2f}"
        )


def main() -> int:
    names = (*SCENARIO_NAMES, UNLIKE)
    options = parse_options(__doc__, 8, "four peers of one scenario", names)
    if options.quick:
        rows = [measure(four_of("two-labs"), 3, emulated_spec(microbatches=8))]
    else:
        rows = [measure(*_case(name, options.steps)) for name in options.scenario]
    return report(rows, options.json)


def _case(name: str, steps: int) -> tuple[Scenario, int, RunSpec]:
    if name == UNLIKE:
        return replace(four_of(UNLIKE_IN), name=UNLIKE), steps, unlike_spec(microbatches=8)
    return scenario_file(name), steps, emulated_spec()


if __name__ == "__main__":
    raise SystemExit(main())
