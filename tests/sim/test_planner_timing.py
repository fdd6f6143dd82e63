"""The planner's own timing of its finalists against the simulator's."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.initial_placements import runs
from p2p_dtfm.core.planner.planner import compute_plan, plan_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.random_swarms import mixed_swarm
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step


@pytest.mark.parametrize(
    ("seed", "stages", "recompute"),
    [
        (5, 2, True),
        (13, 3, False),
        (16, 4, True),
        (17, 3, True),
        (21, 5, False),
        (50, 2, True),
        (1, 1, True),
        (1022, 3, True),
        (1040, 2, True),
        (1058, 2, True),
    ],
)
def test_a_step_takes_as_long_as_in_the_simulator(seed: int, stages: int, recompute: bool) -> None:
    """With and without shared uplinks, where memory starves the pipelines. Some swarms have so many
    pairs of holders that pieces must be divided as their segments are."""
    scenario, spec = mixed_swarm(seed), read_run_spec("gpt3-xl", 12, 64)
    execution = replace(OURS, recompute=recompute)
    problem = problem_of(scenario_snapshot(scenario, spec, execution))
    model = StepModel(problem)
    cost = model.cost(runs(list(range(problem.peer_count)), problem.peer_count // stages))
    if cost is None:
        pytest.skip("these pipelines have too little memory")
    timed = model.simulated(cost)
    plan = plan_of(problem, timed)
    step = simulate_step(plan, scenario, workload_in(scenario, spec, execution), execution)
    assert timed.compute_ns == pytest.approx(step.pipelines_done_ns, rel=1e-6)
    assert timed.step_ns == pytest.approx(step.total_ns, rel=1e-3)
    refined = model.refined(cost)
    assert refined.compute_ns == pytest.approx(step.pipelines_done_ns, rel=0.03)
    if not any(peer.uplink_bytes_per_s for peer in scenario.peers):
        assert refined.step_ns == pytest.approx(step.total_ns, rel=0.01)
        assert cost.step_ns == pytest.approx(step.total_ns, rel=0.15)


def test_what_is_predicted_for_a_small_swarm_is_what_is_simulated() -> None:
    scenario, spec = mixed_swarm(16), read_run_spec("gpt3-xl", 12, 128)
    plan = compute_plan(scenario_snapshot(scenario, spec))
    assert isinstance(plan, Plan)
    step = simulate_step(plan, scenario, workload_in(scenario, spec, OURS), OURS)
    assert plan.predicted_step_ns == pytest.approx(step.total_ns, rel=1e-3)
