"""Bubbles: what the busiest peer of a swarm loses to anything but computing.

    python -m benchmarks.bubbles [--scenario NAME ...] [--steps N] [--quick] [--json]

Eight real daemons with emulated devices over shaped links, as in `benchmarks.prediction`. The
busiest peer is the one whose forwards and backwards take longest in a step; what these and the
optimizer's update leave of the step it loses. Beside it stands what the simulator says that it must
lose with this very plan over the scenario's own links: filling and draining, waiting, reduction and
commit. Where the rest goes is told by the peer's own spans (as `p2p-dtfm trace`).
"""

import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.command_line import conclude, parse_options
from benchmarks.emulated_swarm import (
    EXECUTION,
    LABEL,
    WARM_STEPS,
    Played,
    Span,
    emulated_spec,
    four_of,
    play,
    scenario_file,
    shape_of_plan,
)
from p2p_dtfm.sim.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time import simulate_step

SCENARIO_NAMES = ("one-room", "two-labs", "small-world")
TARGET = 1.10
COMPUTING = ("forward", "backward", "apply")
PARTS = ("wait", "reduce", "guard", "commit")


def busy_s(spans: list[Span], *kinds: str) -> float:
    """Length of the union of the spans of these kinds: some run side by side."""
    total_ns = end_ns = 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.kind in kinds:
            total_ns += max(0, span.end_ns - max(end_ns, span.start_ns))
            end_ns = max(end_ns, span.end_ns)
    return total_ns / 1e9


def row_of(played: Played) -> dict[str, Any]:
    """Seconds of the median step, at the peer that is busiest in the plan as simulated."""
    workload = workload_in(played.scenario, played.spec, EXECUTION)
    simulated = simulate_step(played.plan, played.scenario, workload, EXECUTION)
    busiest = max(simulated.stages, key=lambda stage: (stage.busy_ns, -stage.waiting_ns))
    name = busiest.work.name
    steps = sorted(played.spans[name])[WARM_STEPS:]
    median = {
        kind: statistics.median(busy_s(played.spans[name][step], kind) for step in steps)
        for kind in PARTS
    }
    compute_s = statistics.median(busy_s(played.spans[name][step], *COMPUTING) for step in steps)
    lost_s = statistics.median(played.step_s) - compute_s
    unavoidable_s = (simulated.total_ns - busiest.busy_ns) / 1e9
    return {
        "scenario": played.scenario.name,
        "plan": shape_of_plan(played.plan),
        "peer": name,
        "step_s": round(statistics.median(played.step_s), 3),
        "compute_s": round(compute_s, 3),
        "lost_s": round(lost_s, 3),
        "unavoidable_s": round(unavoidable_s, 3),
        "ratio": round(lost_s / unavoidable_s, 3),
        **{f"{kind}_s": round(value, 3) for kind, value in median.items()},
    }


def report(rows: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the target is met everywhere."""
    worst = max(row["ratio"] for row in rows)
    met = worst <= TARGET
    figures = {"label": LABEL, "scenarios": rows, "worst_ratio": worst, "target": TARGET}
    verdict = f"worst {worst:.2f}, target {TARGET:.2f}"
    return conclude(figures, _table(rows), verdict, met, as_json)


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield f"{LABEL}; seconds of a step at its busiest peer"
    yield (
        f"{'scenario':14s} {'plan':12s} {'step':>6s} {'compute':>8s} {'lost':>6s} "
        f"{'unavoidable':>11s} {'ratio':>6s}   " + " ".join(f"{kind:>6s}" for kind in PARTS)
    )
    for row in rows:
        parts = " ".join(f"{row[f'{kind}_s']:6.2f}" for kind in PARTS)
        yield (
            f"{row['scenario']:14s} {row['plan']:12s} {row['step_s']:6.2f} "
            f"{row['compute_s']:8.2f} {row['lost_s']:6.2f} {row['unavoidable_s']:11.2f} "
            f"{row['ratio']:6.2f}   {parts}"
        )


def main() -> int:
    options = parse_options(__doc__, 8, "four peers of one scenario", SCENARIO_NAMES)
    if options.quick:
        scenarios, steps, spec = [four_of("one-room")], 3, emulated_spec(microbatches=8)
    else:
        scenarios = [scenario_file(name) for name in options.scenario]
        steps, spec = options.steps, emulated_spec()
    rows = []
    for scenario in scenarios:
        with tempfile.TemporaryDirectory(prefix="p2p-dtfm-bubbles-") as name:
            rows.append(row_of(play(scenario, steps, Path(name), spec)))
    return report(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
