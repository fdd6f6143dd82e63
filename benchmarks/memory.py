"""Memory: what a daemon holds against what it must hold, and whether it grows.

    python -m benchmarks.memory [--kind peak|growth] [--steps N] [--quick] [--json]

Two swarms of real daemons that really compute, over loopback:

- peak: two daemons with a model of 26 million parameters. What each must hold is the state of its
  layers (parameters, gradient, two moments), this step's reduced gradients and the activations of
  its microbatches in flight, by the same count the planner uses; and, as guardian of the other's
  layers, their parameters and moments, and both steps' reduced gradients that a recovery may ask
  for. Resident bytes at their
  highest, less those of the same daemon before it held a layer, over that.
- growth: three daemons with `tiny` for 1,000 steps: resident bytes of each daemon and its p2pd
  after a fifth of the steps and at the end.

Lower bound beside the first: what must be held for training alone, without a guardian.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchmarks.command_line import conclude, parse_options
from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import PROCESSOR
from p2p_dtfm.core.protocol.run_spec import BatchSpec, EvaluationSpec, ModelSpec, RunSpec
from p2p_dtfm.core.protocol.sections.checkpoint_spec import CheckpointSpec
from p2p_dtfm.core.protocol.sections.data_spec import DataSpec
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, STATE_COPIES, workload_of
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.train.data import prepare

KINDS = ("peak", "growth")
GROWTH_TARGET = 0.05
PEAK_TARGET = 1.5
"""The target: times what must be held."""
PEAK_MEMORY_GIB = 0.45
"""Memory given to each daemon, so that the model has to be divided."""
PEAK_STEPS = 6
SETTLED_AT = 0.2
POLL_S = 0.2
START_S = 300.0
NEVER = 1 << 30
MIB = 1 << 20


def _spec(steps: int, width: int, layers: int, context: int, sequences: int) -> RunSpec:
    return RunSpec(
        name="memory",
        seed=1,
        total_steps=steps,
        model=ModelSpec(layers=layers, width=width, heads=4, context=context, vocabulary=256),
        batch=BatchSpec(global_batch=4 * sequences, microbatch=sequences),
        optimizer=OptimizerSpec(peak_learning_rate=1e-3),
        data=DataSpec(source="data"),
        evaluation=EvaluationSpec(every_steps=50, sequences=sequences),
        checkpoint=CheckpointSpec(every_steps=NEVER),
    )


@dataclass
class Watched:
    """Resident bytes of a daemon by the step that it told at that time; -1 before the first
    step."""

    child: Child
    python: dict[int, int] = field(default_factory=dict)
    p2pd: dict[int, int] = field(default_factory=dict)
    bare_bytes: int = 0
    """The most bytes before the daemon held a layer."""
    peak_bytes: int = 0

    def look(self) -> int:
        """Take a sample; returns the step."""
        facts = self.child.status()
        step = -1 if not facts or facts.get("step") is None else int(facts["step"])
        process = psutil.Process(self.child.process.pid)
        resident = process.memory_info().rss
        if facts and not facts["layers"]:
            self.bare_bytes = max(self.bare_bytes, resident)
        self.peak_bytes = max(self.peak_bytes, resident)
        self.python[step] = resident
        self.p2pd[step] = sum(each.memory_info().rss for each in process.children(recursive=True))
        return step


def _run(
    count: int,
    spec: RunSpec,
    directory: Path,
    arguments: tuple[str, ...],
    on_end: Callable[[list[Watched]], None],
) -> list[Watched]:
    """Watch so many daemons until all have made all steps but the last. Then call `on_end`."""
    text = directory / "text.txt"
    text.write_text("\n".join(f"{n} times {n} is {n * n}." for n in range(4000)))
    prepare([text], directory / "data", context=spec.model.context)
    run = directory / "run.json"
    run.write_text(spec.model_dump_json())
    shared = ("--threads", "1", "--dashboard", "off", *arguments)
    with LocalSwarm(directory, shared) as swarm:
        first, address = swarm.found(["--run", str(run), "--expect-peers", str(count)])
        children = [first, *(swarm.join(address) for _ in range(count - 1))]
        watched = [Watched(child) for child in children]
        seen, progress_s = -1, time.monotonic()
        while seen < spec.total_steps:
            for child in children:
                if not child.running:
                    raise SystemExit(f"{child.name} ended:\n{child.log_tail()}")
            step = min(each.look() for each in watched)
            if step > seen:
                seen, progress_s = step, time.monotonic()
            if time.monotonic() - progress_s > START_S:
                raise SystemExit(f"no step in {START_S:g} s:\n{first.log_tail()}")
            time.sleep(POLL_S)
        on_end(watched)
        for child in children:
            child.process.kill()
    return watched


def measure_peak(quick: bool) -> list[dict[str, Any]]:
    """A row for each daemon."""
    width, layers = (256, 8) if quick else (512, 8)
    spec = _spec(PEAK_STEPS, width, layers, 128, 2)
    limit_gib = PEAK_MEMORY_GIB * (width / 512) ** 2
    held: list[dict[str, Any]] = []

    def remember(watched: list[Watched]) -> None:
        held.append(ask_daemon(watched[0].child.home, "plan"))
        held.extend(each.child.status() for each in watched)

    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-memory-") as name:
        limit = ("--memory-gib", f"{limit_gib:.3f}")
        watched = _run(2, spec, Path(name), limit, remember)
    plan = msgspec.convert(held[0]["plan"], Plan)
    rows = []
    for each, facts in zip(watched, held[1:], strict=True):
        must, with_guard = must_hold_bytes(spec, plan, facts["peer_id"], facts["layers"])
        above = each.peak_bytes - each.bare_bytes
        rows.append(
            {
                "peer": each.child.name,
                "layers": len(plan.layers_of(facts["peer_id"])),
                "guarded": len(facts["layers"]) - len(plan.layers_of(facts["peer_id"])),
                "bare_mib": round(each.bare_bytes / MIB, 1),
                "peak_mib": round(each.peak_bytes / MIB, 1),
                "training_mib": round(must / MIB, 1),
                "must_hold_mib": round(with_guard / MIB, 1),
                "ratio": round(above / with_guard, 3),
            }
        )
    return rows


def must_hold_bytes(spec: RunSpec, plan: Plan, peer_id: str, held: list[int]) -> tuple[int, int]:
    """Bytes for training alone, and with what a guardian and a recovery need."""
    workload = workload_of(spec)
    stage = plan.stage_of(peer_id)
    assert stage is not None, "both daemons have a stage"
    memory = stage_memory(workload).of(PROCESSOR, len(plan.pipelines)).layers
    first, end = stage.first_layer, stage.end_layer
    training = memory.state_bytes(first, end) + stage.in_flight * memory.saved_bytes(first, end)
    guarded = [workload.cost(layer) for layer in held if layer not in stage.layers]
    others = sum(cost.parameter_count for cost in guarded)
    return training, training + FLOAT_BYTES * (STATE_COPIES + 1) * others


def measure_growth(steps: int) -> list[dict[str, Any]]:
    """A row for each daemon."""
    spec = _spec(steps, 64, 4, 32, 4)
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-memory-") as name:
        watched = _run(3, spec, Path(name), (), lambda watched: None)
    return [
        {
            "peer": each.child.name,
            **{
                f"{part}_{when}_mib": round(at(samples, step) / MIB, 1)
                for part, samples in (("python", each.python), ("p2pd", each.p2pd))
                for when, step in (("settled", int(steps * SETTLED_AT)), ("end", steps))
            },
            "growth": round(at(each.python, steps) / at(each.python, steps * SETTLED_AT) - 1, 4),
            "growth_p2pd": round(at(each.p2pd, steps) / at(each.p2pd, steps * SETTLED_AT) - 1, 4),
        }
        for each in watched
    ]


def at(samples: dict[int, int], step: float) -> int:
    """The sample at the last seen step no later than this one."""
    return samples[max(seen for seen in samples if seen <= step)]


def report(peak: list[dict[str, Any]], growth: list[dict[str, Any]], as_json: bool) -> int:
    """Print; 0 if the targets of what was measured are met."""
    worst_growth = max((row["growth"] for row in growth), default=0.0)
    worst_peak = max((row["ratio"] for row in peak), default=0.0)
    met = worst_growth <= GROWTH_TARGET and worst_peak <= PEAK_TARGET
    figures = {
        "peak": peak,
        "growth": growth,
        "worst_growth": worst_growth,
        "worst_ratio": worst_peak,
        "targets": {"growth": GROWTH_TARGET, "ratio": PEAK_TARGET},
    }
    verdicts = [f"peak {worst_peak:.2f} (target {PEAK_TARGET:g})"] if peak else []
    verdicts += [f"growth {worst_growth:.1%} (target {GROWTH_TARGET:.0%})"] if growth else []
    return conclude(figures, _tables(peak, growth), ", ".join(verdicts), met, as_json)


def _tables(peak: list[dict[str, Any]], growth: list[dict[str, Any]]) -> Iterator[str]:
    if peak:
        yield "MiB:    layers  guarded    bare    peak  training  must hold   excess over it"
    for row in peak:
        yield (
            f"{row['peer']:8s} {row['layers']:5d} {row['guarded']:8d} {row['bare_mib']:7.0f} "
            f"{row['peak_mib']:7.0f} {row['training_mib']:9.0f} {row['must_hold_mib']:10.0f} "
            f"{row['ratio']:10.2f}"
        )
    if growth:
        yield "MiB:    settled     end  growth   p2pd settled     end  growth"
    for row in growth:
        yield (
            f"{row['peer']:8s} {row['python_settled_mib']:6.1f} {row['python_end_mib']:7.1f} "
            f"{row['growth']:7.1%} {row['p2pd_settled_mib']:14.1f} {row['p2pd_end_mib']:7.1f} "
            f"{row['growth_p2pd']:7.1%}"
        )


def main() -> int:
    options = parse_options(__doc__, 1000, "a smaller model and 100 steps", kinds=KINDS)
    steps = 100 if options.quick else options.steps
    peak = measure_peak(options.quick) if "peak" in options.kind else []
    growth = measure_growth(steps) if "growth" in options.kind else []
    return report(peak, growth, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
