"""What sending gradients layer by layer, and splitting backwards, gains.

    python -m benchmarks.overlap [--swarms N] [--first-seed N] [--quick] [--json]

Random swarms (`mixed_swarm`) are each planned once and simulated three times. Gradients set out
when a stage is done; when the last backward is through their layer; and the latter with split
backwards, as the daemon does it (`ours`). There is no recomputation, with which nothing is split.
"""

import argparse
import json
import statistics
from dataclasses import replace
from typing import Any

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.random_swarms import mixed_swarm
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

FULL = replace(OURS, recompute=False)
WAYS = {
    "by stage": replace(FULL, overlap="stage", split_backward=False),
    "by layer": replace(FULL, split_backward=False),
    "ours": FULL,
}
LAYERS, GLOBAL_BATCH = 12, 128


def compare(seed: int) -> dict[str, Any] | None:
    """Seconds of a step in each way; None if the swarm has no plan."""
    scenario, spec = mixed_swarm(seed), read_run_spec("gpt3-xl", LAYERS, GLOBAL_BATCH)
    plan = compute_plan(scenario_snapshot(scenario, spec, FULL))
    if not isinstance(plan, Plan):
        return None
    workload = workload_in(scenario, spec, FULL)
    times = {
        name: simulate_step(plan, scenario, workload, how).total_ns / 1e9
        for name, how in WAYS.items()
    }
    return {
        "seed": seed,
        "pipelines": len(plan.pipelines),
        "stages": max(len(pipeline.stages) for pipeline in plan.pipelines),
        "microbatches": max(pipeline.microbatch_count for pipeline in plan.pipelines),
        **{name: round(time_s, 3) for name, time_s in times.items()},
        "gain": round(1 - times["ours"] / times["by stage"], 4),
        "predicted": round(plan.predicted_step_ns / 1e9 / times["ours"], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--swarms", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=19)
    parser.add_argument("--quick", action="store_true", help="five swarms")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    count = 5 if options.quick else options.swarms
    found = [compare(options.first_seed + number) for number in range(count)]
    rows = [row for row in found if row is not None]
    gains = [row["gain"] for row in rows]
    if options.json:
        print(json.dumps({"rows": rows, "mean_gain": statistics.mean(gains)}))
        return 0
    print("seed pipelines x stages microbatches  by stage  by layer      ours    gain  predicted")
    for row in rows:
        shape = f"{row['pipelines']} x {row['stages']}"
        times = " ".join(f"{row[name]:9.3f}" for name in WAYS)
        print(
            f"{row['seed']:4d} {shape:>18s} {row['microbatches']:12d} {times} {row['gain']:7.1%} "
            f"{row['predicted']:10.4f}"
        )
    print(f"gain: mean {statistics.mean(gains):.1%}, best {max(gains):.1%}, worst {min(gains):.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
