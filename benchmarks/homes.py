"""Homes: whether six homes together train as fast as their plan says.

    python -m benchmarks.homes [--steps N] [--quick] [--json]

The packaged swarm `three-homes` with the recipe of `gpt2-small-homes`, played by six real daemons
with emulated devices over shaped links: real protocol, real bytes, real waiting, no real computing.
Six replicas of GPT-2 small take 43 GB of memory, so what is played is a model of some fifty times
fewer parameters. All rates of links are as many times less, latencies are as they are, and devices
are so slow that a step takes as long as with GPT-2 small: what is computed, what is sent and what
is waited for keep their proportions. What daemons say to each other beside training does not
shrink, and weighs fifty times more here.

Measured is the median step of the last view, and of the fastest home alone; predicted what the
plan in force says, made from what the daemons had measured themselves.
"""

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.command_line import conclude, parse_options
from benchmarks.emulated_swarm import EXECUTION, LABEL, Played, play, shape_of_plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.scenario.files import packaged_configs, read_run_spec
from p2p_dtfm.sim.scenario.scenario import Scenario, load_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in

SCENARIO = "three-homes"
RECIPE = "gpt2-small-homes"
FASTEST = "tokyo-1"
LAYERS, WIDTH, HEADS, CONTEXT, VOCABULARY = 12, 144, 4, 32, 256
GLOBAL_BATCH = 384
TEXT_LINES = 400
"""Data of 10 kB: five homes fetch them from the founder, over a line of 47 kB/s."""
WORST_ERROR = 0.10
LEAST_GAIN = 3.0
ALONE_STEPS = 2
"""Steps of the fastest home alone: they take three times as long, and nothing is sent in them."""


@dataclass(frozen=True)
class Smaller:
    """The swarm as it is played."""

    scenario: Scenario
    spec: RunSpec
    times_fewer_parameters: float
    times_slower_devices: float


def main() -> int:
    options = parse_options(__doc__, 5, "two measured steps, and no home alone")
    smaller = smaller_swarm()
    together = _played(smaller, smaller.scenario, 2 if options.quick else options.steps)
    alone = None
    if not options.quick:
        alone = _played(smaller, smaller.scenario.with_peers((FASTEST,)), ALONE_STEPS)
    return report(smaller, together, alone, options.json)


def smaller_swarm() -> Smaller:
    """A swarm that keeps the proportions of the packaged swarm and recipe."""
    whole = read_run_spec(packaged_configs() / f"{RECIPE}.toml")
    scenario = load_scenario(packaged_configs() / "scenarios" / f"{SCENARIO}.toml")
    sizes = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "context": CONTEXT}
    spec = whole.model_copy(
        update={
            "model": whole.model.model_copy(update={**sizes, "vocabulary": VOCABULARY}),
            "batch": whole.batch.model_copy(update={"global_batch": GLOBAL_BATCH}),
            "evaluation": whole.evaluation.model_copy(
                update={"every_steps": 1 << 30, "sequences": 4}
            ),
            "checkpoint": whole.checkpoint.model_copy(update={"every_steps": 1 << 30}),
            "data": whole.data.model_copy(update={"source": "data"}),
        }
    )
    before, after = (workload_in(scenario, each, EXECUTION) for each in (whole, spec))
    fewer = _parameters(before) / _parameters(after)
    slower = _step_operations(before) / _step_operations(after)
    peers = tuple(
        replace(
            peer,
            forward_flops=int((peer.forward_flops or 0) / slower),
            uplink_bytes_per_s=int(peer.uplink_bytes_per_s / fewer),
            downlink_bytes_per_s=int(peer.downlink_bytes_per_s / fewer),
            memory_bytes=max(1 << 29, int(peer.memory_bytes / fewer)),
        )
        for peer in scenario.peers
    )
    links = {
        ends: replace(link, bytes_per_s=int(link.bytes_per_s / fewer))
        for ends, link in scenario.links.items()
    }
    scenario = replace(scenario, peers=peers, links=links, faults=())
    return Smaller(scenario, spec, fewer, slower)


def _parameters(workload: Workload) -> int:
    return sum(workload.cost(layer).parameter_count for layer in range(workload.layer_count))


def _step_operations(workload: Workload) -> int:
    each = (workload.cost(layer).forward_flops for layer in range(workload.layer_count))
    return workload.microbatch_count * sum(each)


def _played(smaller: Smaller, scenario: Scenario, steps: int) -> Played:
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-homes-") as name:
        return play(scenario, steps, Path(name), smaller.spec, text_lines=TEXT_LINES)


def report(smaller: Smaller, together: Played, alone: Played | None, as_json: bool) -> int:
    """Print. Returns 0 if the prediction holds and six homes are worth three of the fastest."""
    measured_s = statistics.median(together.step_s)
    predicted_s = together.plan.predicted_step_ns / 1e9
    error = measured_s / predicted_s - 1
    figures: dict[str, Any] = {
        "label": LABEL,
        "times_fewer_parameters": round(smaller.times_fewer_parameters, 1),
        "times_slower_devices": round(smaller.times_slower_devices),
        "plan": shape_of_plan(together.plan),
        "spares": len(together.plan.spares),
        "steps_s": [round(each, 3) for each in together.step_s],
        "measured_s": round(measured_s, 3),
        "predicted_s": round(predicted_s, 3),
        "error": round(error, 4),
        "processors": round(together.processors, 2),
        "targets": {"error": WORST_ERROR, "gain": LEAST_GAIN},
    }
    met = abs(error) <= WORST_ERROR and not together.plan.spares
    verdict = f"{error:+.1%} from the prediction (target {WORST_ERROR:.0%})"
    if alone is not None:
        alone_s = statistics.median(alone.step_s)
        gain = alone_s / measured_s
        figures |= {"alone_s": round(alone_s, 3), "gain": round(gain, 2)}
        met = met and gain >= LEAST_GAIN
        verdict += f", {gain:.2f} times the fastest home alone (target {LEAST_GAIN:g})"
    return conclude(figures, _table(figures), verdict, met, as_json)


def _table(figures: dict[str, Any]) -> Iterator[str]:
    yield f"{LABEL}; {SCENARIO} with the recipe of {RECIPE}"
    yield (
        f"{figures['times_fewer_parameters']:g} times fewer parameters, links as many times "
        f"thinner; pipelines of {figures['plan']} stages"
    )
    yield f"steps: {', '.join(f'{each:.2f}' for each in figures['steps_s'])} s"
    yield f"measured {figures['measured_s']:.2f} s, predicted {figures['predicted_s']:.2f} s"
    if "alone_s" in figures:
        yield f"{FASTEST} alone: {figures['alone_s']:.2f} s"
    yield f"processors used by all daemons together: {figures['processors']:.2f}"


if __name__ == "__main__":
    raise SystemExit(main())
