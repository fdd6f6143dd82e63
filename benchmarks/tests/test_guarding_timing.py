"""The planner's time for guarding, on the benchmarks' own scenarios, against the simulator's."""

from dataclasses import replace

import pytest

from benchmarks.emulated_swarm import EXECUTION, emulated_spec, scenario_file
from p2p_dtfm.core.cost_model import cuts
from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.planner import plan_of
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step


@pytest.mark.parametrize("kept", [8, 6, 3])
def test_a_lone_pipeline_waits_for_its_guardians_as_in_the_simulator(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The uplinks are thin, with and without spares to guard, and several holders have one
    guardian. The guardians would lag, if this test did not keep them from it."""
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
    """Such guardians lag, in the planner as in the simulator."""
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
