"""What the planner predicts, what the simulator measures, and what no plan can beat."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import grid_lower_bound_ns, step_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.paper.named_plans import grid_plan, region_order, within_memory
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.random_swarms import mixed_swarm
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from tests.sim.sim_support import equal_peers, small_spec


@pytest.mark.parametrize("seed", [19, 49, 68, 80])
def test_predictions_and_bounds_of_mixed_swarms(seed: int) -> None:
    scenario, spec = mixed_swarm(seed), read_run_spec("gpt3-xl", 12, 128)
    snapshot = scenario_snapshot(scenario, spec)
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    step_ns = simulate_step(plan, scenario, workload_in(scenario, spec, OURS), OURS).total_ns
    assert 0.95 < plan.predicted_step_ns / step_ns < 1.05
    assert step_lower_bound_ns(problem_of(snapshot)) <= step_ns


@pytest.mark.parametrize("seed", [21])
def test_split_backwards_and_gradients_by_layer_are_predicted(seed: int) -> None:
    """Without recomputation, split backwards and gradients by layer both tell; the planner knew
    their gain."""
    whole = replace(OURS, recompute=False)
    scenario, spec = mixed_swarm(seed), read_run_spec("gpt3-xl", 12, 128)
    plan = compute_plan(scenario_snapshot(scenario, spec, whole))
    assert isinstance(plan, Plan)
    workload = workload_in(scenario, spec, whole)
    step_ns = simulate_step(plan, scenario, workload, whole).total_ns
    assert 0.99 < plan.predicted_step_ns / step_ns < 1.01
    plainer = replace(whole, overlap="stage", split_backward=False)
    assert step_ns < 0.99 * simulate_step(plan, scenario, workload, plainer).total_ns


def test_splitting_shortens_a_short_step() -> None:
    """Four stages and eight microbatches: the drain is a fifth of the step."""
    scenario = equal_peers(4, latency_ms=0.1)
    spec = small_spec(layers=14, global_batch=8, width=512)
    split = replace(OURS, recompute=False)
    workload = workload_in(scenario, spec, split)
    plan = grid_plan(region_order(scenario), workload, 4)
    took = [
        simulate_step(plan, scenario, workload, how).total_ns
        for how in (split, replace(split, split_backward=False))
    ]
    assert 0.8 < took[0] / took[1] < 0.95


@pytest.mark.parametrize("latency_ms", [1.0, 40.0, 150.0])
def test_no_grid_beats_the_bound_of_grids(latency_ms: float) -> None:
    scenario = equal_peers(12, latency_ms)
    spec = small_spec(layers=12, global_batch=96, width=512)
    workload = workload_in(scenario, spec, OURS)
    bound_ns = grid_lower_bound_ns(problem_of(scenario_snapshot(scenario, spec)))
    assert bound_ns is not None
    steps = [
        simulate_step(
            within_memory(grid_plan(region_order(scenario), workload, stages), scenario, workload),
            scenario, workload, OURS,
        ).total_ns
        for stages in (1, 2, 3, 4, 6, 12)
    ]  # fmt: skip
    assert bound_ns <= min(steps) < (1.25 if latency_ms < 100 else 1.5) * bound_ns
