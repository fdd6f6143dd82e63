"""The planner's own timing of its finalists against the simulator's."""

from dataclasses import replace

import pytest

from benchmarks.emulated_swarm import EXECUTION, emulated_spec, scenario_file
from benchmarks.random_swarms import mixed_swarm
from p2p_dtfm.core.cost_model import cuts
from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.initial_placements import runs
from p2p_dtfm.core.planner.planner import compute_plan, plan_of
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.scenario.execution import OURS
from p2p_dtfm.sim.scenario.files import read_run_spec
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
    """With and without shared uplinks, where memory starves the pipelines, and where there are so
    many pairs of holders that pieces must be divided as their segments are."""
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


@pytest.mark.parametrize("kept", [8, 6, 3])
def test_a_lone_pipeline_waits_for_its_guardians_as_in_the_simulator(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thin uplinks; with and without spares to guard, and several holders with one guardian. They
    would lag, were it not for this test."""
    monkeypatch.setattr(cuts, "LAGGING_STEP_SHARE", 0)
    scenario = scenario_file("uneven-homes")
    roomy = tuple(replace(peer, memory_bytes=10**9) for peer in scenario.peers[:kept])
    scenario, spec = replace(scenario, peers=roomy), emulated_spec()
    problem = problem_of(scenario_snapshot(scenario, spec, EXECUTION))
    model = StepModel(problem)
    for used in (kept, kept - 2):
        cost = model.cost((tuple(range(used)),))
        assert cost is not None
        timed = model.simulated(cost)
        workload = workload_in(scenario, spec, EXECUTION)
        step = simulate_step(plan_of(problem, timed), scenario, workload, EXECUTION)
        assert step.guarding_ns > step.total_ns // 50
        assert timed.step_ns == pytest.approx(step.total_ns, rel=1e-3)
        assert cost.reduction_ns == pytest.approx(step.guarding_ns, rel=0.05)
        assert model.refined(cost).step_ns == pytest.approx(step.total_ns, rel=0.02)


def test_guardians_that_would_cost_more_than_a_fiftieth_of_a_step_cost_nothing() -> None:
    """They lag, to the planner as in the simulator."""
    scenario = scenario_file("uneven-homes")
    peers = tuple(
        replace(peer, memory_bytes=10**12, uplink_bytes_per_s=1000) for peer in scenario.peers[:2]
    )
    scenario, spec = replace(scenario, peers=peers), emulated_spec()
    problem = problem_of(scenario_snapshot(scenario, spec, EXECUTION))
    cost = StepModel(problem).cost(((0,),))
    assert cost is not None and cost.reduction_ns == 0
    plan, workload = plan_of(problem, cost), workload_in(scenario, spec, EXECUTION)
    assert simulate_step(plan, scenario, workload, EXECUTION).guarding_ns == 0
