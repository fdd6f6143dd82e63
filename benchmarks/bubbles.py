"""Bubbles: what the busiest peer of a swarm loses to anything but computing.

    python -m benchmarks.bubbles [--scenario NAME ...] [--steps N] [--slower N] [--quick] [--json]

Eight real daemons with emulated devices over shaped links, as in `benchmarks.prediction`. The
busiest peer is the one whose forwards and backwards take longest in a step; what these and the
optimizer's update leave of the step it loses. Beside it stands what the simulator says that it must
lose with this very plan over the scenario's own links: filling and draining, waiting, reduction and
commit. Where the rest goes is told part by part from the peer's own spans (as `p2p-dtfm trace`),
beside the simulator's for the same peer:

- start: from one step's commit, less the update, to the first thing that it does of the next
- fill: from there until its first forward
- waiting: for activations and gradients, until its last backward
- between: from one forward or backward to the next where nothing was waited for
- tail: from its last backward until it says Prepared: reduction, guardians, norms
- commit: from there until it has everyone's

With `--slower N` all devices and links are so many times slower. What the engine loses grows with
them; what eight daemons on one machine take from each other does not.
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
    slowed,
)
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.timeline import StageTimeline, StepTime

SCENARIO_NAMES = ("one-room", "two-labs", "small-world")
TARGET = 1.10
COMPUTING = ("forward", "backward", "apply")
TASKLETS = ("forward", "backward")
PARTS = ("start", "fill", "waiting", "between", "tail", "commit")
"""The parts of the lost time: they add up to it."""


def busy_s(spans: list[Span], *kinds: str) -> float:
    """Length of the union of the spans of these kinds, some of which run side by side."""
    total_ns = end_ns = 0
    for span in sorted(spans, key=lambda span: span.start_ns):
        if span.kind in kinds:
            total_ns += max(0, span.end_ns - max(end_ns, span.start_ns))
            end_ns = max(end_ns, span.end_ns)
    return total_ns / 1e9


def lost_parts_s(before: list[Span], spans: list[Span]) -> dict[str, float]:
    """Where a peer's time of one step goes besides computing. `before`: the spans of the step
    before."""
    tasklets = [span for span in spans if span.kind in TASKLETS]
    first_ns = min(span.start_ns for span in tasklets)
    last_ns = max(span.end_ns for span in tasklets)
    within = [span for span in spans if span.kind == "wait" and first_ns <= span.start_ns]
    begun_ns = min(span.start_ns for span in spans)
    committed_ns = max(span.end_ns for span in before if span.kind == "commit")
    (commit,) = (span for span in spans if span.kind == "commit")
    waiting_s = busy_s([span for span in within if span.end_ns <= last_ns], "wait")
    return {
        "start": (begun_ns - committed_ns) / 1e9 - busy_s(before, "apply"),
        "fill": (first_ns - begun_ns) / 1e9,
        "waiting": waiting_s,
        "between": (last_ns - first_ns) / 1e9 - busy_s(spans, *TASKLETS) - waiting_s,
        "tail": (commit.start_ns - last_ns) / 1e9,
        "commit": (commit.end_ns - commit.start_ns) / 1e9,
    }


def unavoidable_parts_s(simulated: StepTime, stage: StageTimeline) -> dict[str, float]:
    """The same parts as simulated; this needs a trace. The simulated commit is the last peer's. For
    this peer the commit is all that is left of the step once its own reduction is done."""
    assert stage.tasklets is not None, "simulate with a trace"
    first_ns = stage.tasklets[0][2]
    parts_ns = {
        "start": 0,
        "fill": first_ns,
        "waiting": stage.done_ns - first_ns - stage.busy_ns,
        "between": 0,
        "tail": simulated.total_ns - simulated.commit_ns - stage.done_ns,
        "commit": simulated.commit_ns,
    }
    return {part: value / 1e9 for part, value in parts_ns.items()}


def row_of(played: Played) -> dict[str, Any]:
    """Seconds of the median step, at the peer that is busiest in the plan as simulated."""
    workload = workload_in(played.scenario, played.spec, EXECUTION)
    simulated = simulate_step(played.plan, played.scenario, workload, EXECUTION, trace=True)
    busiest = max(simulated.stages, key=lambda stage: (stage.busy_ns, -stage.waiting_ns))
    name = busiest.work.name
    spans = played.spans[name]
    steps = sorted(spans)[WARM_STEPS:]
    compute_s = statistics.median(busy_s(spans[step], *COMPUTING) for step in steps)
    apply_s = statistics.median(busy_s(spans[step], "apply") for step in steps)
    parts = [lost_parts_s(spans[step - 1], spans[step]) for step in steps if step - 1 in spans]
    step_s = statistics.median(played.step_s)
    lost_s, unavoidable_s = step_s - compute_s, (simulated.total_ns - busiest.busy_ns) / 1e9
    return {
        "scenario": played.scenario.name,
        "plan": shape_of_plan(played.plan),
        "peer": name,
        "step_s": round(step_s, 3),
        "compute_s": round(compute_s, 3),
        "update_s": round(apply_s, 3),
        "lost_s": round(lost_s, 3),
        "unavoidable_s": round(unavoidable_s, 3),
        "ratio": round(lost_s / unavoidable_s, 3),
        "processors": round(played.processors, 2),
        "lost_parts_s": {
            part: round(statistics.median(each[part] for each in parts), 3) for part in PARTS
        },
        "unavoidable_parts_s": {
            part: round(value, 3) for part, value in unavoidable_parts_s(simulated, busiest).items()
        },
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
        f"{'scenario':14s} {'plan':12s} {'step':>6s} {'compute':>8s} {'':>11s} {'lost':>7s} "
        f"{'ratio':>6s} " + " ".join(f"{part:>8s}" for part in PARTS)
    )
    for row in rows:
        for name, title in (("lost", "measured"), ("unavoidable", "unavoidable")):
            left = (
                f"{row['scenario']:14s} {row['plan']:12s} {row['step_s']:6.2f} "
                f"{row['compute_s']:8.2f}"
                if name == "lost"
                else " " * 43
            )
            ratio = f"{row['ratio']:6.2f}" if name == "lost" else " " * 6
            parts = " ".join(f"{row[f'{name}_parts_s'][part]:8.3f}" for part in PARTS)
            yield f"{left} {title:>11s} {row[f'{name}_s']:7.3f} {ratio} {parts}"
        yield f"{'':14s} processors in use, of all daemons: {row['processors']:.2f}"


def main() -> int:
    options = parse_options(__doc__, 8, "four peers of one scenario", SCENARIO_NAMES, slower=True)
    if options.quick:
        scenarios, steps, spec = [four_of("one-room")], 3, emulated_spec(microbatches=8)
    else:
        scenarios = [slowed(scenario_file(name), options.slower) for name in options.scenario]
        steps, spec = options.steps, emulated_spec()
    rows = []
    for scenario in scenarios:
        with tempfile.TemporaryDirectory(prefix="p2p-dtfm-bubbles-") as name:
            rows.append(row_of(play(scenario, steps, Path(name), spec)))
    return report(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
