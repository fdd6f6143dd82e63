"""Time, memory and quality of plans for large swarms.

    python -m benchmarks.placement_scale [--quick] [--peers 1024] [--json]

`over_bound` is the predicted step over a lower bound (`core/planner/bound.py`). `simulated_in_s`:
how long the simulator takes for one step of the plan, and of the paper's case 5 in region order
with 8,192 microbatches.
"""

import argparse
import json
import resource
import time

from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.paper.named_plans import grid_plan, region_order
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.random_swarms import large_swarm
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

LIMITS_S = {64: 10.0, 256: 10.0, 1024: 10.0}
MEMORY_LIMIT_BYTES = 1 << 30


def measured(count: int, batch: int) -> dict[str, object]:
    """Plan for `count` peers; seconds of this process, and its highest memory so far."""
    scenario, spec = large_swarm(count), read_run_spec("gpt3-xl", 24, batch)
    snapshot = scenario_snapshot(scenario, spec)
    began = time.process_time()
    plan = compute_plan(snapshot)
    elapsed = time.process_time() - began
    assert isinstance(plan, Plan)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    began = time.process_time()
    simulate_step(plan, scenario, workload_in(scenario, spec, OURS), OURS)
    simulated = time.process_time() - began
    return {
        "peers": count,
        "planned_s": round(elapsed, 2),
        "memory_mib": memory >> 20,
        "step_s": plan.predicted_step_ns / 1e9,
        "over_bound": plan.predicted_step_ns / step_lower_bound_ns(problem_of(snapshot)),
        "pipelines": len(plan.pipelines),
        "spares": len(plan.spares),
        "simulated_in_s": round(simulated, 2),
        "ok": elapsed <= LIMITS_S[count] and memory <= MEMORY_LIMIT_BYTES,
    }


def paper_case_simulated_in_s() -> float:
    """Seconds for 64 peers, 8 stages, and 128 microbatches for each peer."""
    scenario, spec = read_scenario("paper-5-world-wide-as-run"), read_run_spec("gpt3-xl", 24, 8192)
    workload = workload_in(scenario, spec, OURS)
    plan = grid_plan(region_order(scenario), workload, 8)
    began = time.process_time()
    simulate_step(plan, scenario, workload, OURS)
    return round(time.process_time() - began, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="64 peers only")
    parser.add_argument("--peers", type=int, choices=list(LIMITS_S), help="so many only")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    batches = {64: 1024, 256: 2048, 1024: 4096}
    counts = [arguments.peers or 64] if arguments.quick or arguments.peers else list(batches)
    rows = [measured(count, batches[count]) for count in counts]
    if arguments.json:
        print(
            json.dumps(
                {"rows": rows, "limits_s": LIMITS_S, "memory_limit_bytes": MEMORY_LIMIT_BYTES}
            )
        )
        return
    print(f"64 peers, 8,192 microbatches simulated in {paper_case_simulated_in_s()} s")
    print("  ".join(f"{key:>12}" for key in rows[0]))
    for row in rows:
        shown = (f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values())
        print("  ".join(f"{value:>12}" for value in shown))


if __name__ == "__main__":
    main()
