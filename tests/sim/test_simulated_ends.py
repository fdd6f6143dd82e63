"""What the simulator knows of the ends of a pipeline: a tied head, and to whom they are left."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from tests.sim.sim_support import equal_peers, small_spec
from tests.sim.test_plans_of_runs import changed, state_bytes


def planned(scenario: Scenario, spec: RunSpec) -> Plan:
    plan = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    assert isinstance(plan, Plan), plan.reason
    return plan


@pytest.mark.parametrize("limits", ["", "uplink_mbps = 20", "downlink_mbps = 10"])
def test_ends_that_share_a_matrix_give_each_other_its_sums(limits: str) -> None:
    """The prediction counts these sums, and the simulator did not. Steps over thin lines took half
    as long in it as predicted."""
    plain = small_spec(layers=4, global_batch=4, width=64)
    spec = changed(plain, model=plain.model.model_dump() | {"tied_head": True})
    memory = f"memory_gb = {0.7 * state_bytes(spec) / 1e9}\n{limits}"
    scenario = replace(equal_peers(2, latency_ms=3.0, limits=memory), head=True)
    plan = planned(scenario, spec)
    assert len(plan.pipelines[0].stages) == 2
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-3)


def test_whoever_may_not_have_the_ends_guards_none_in_the_simulator_either() -> None:
    founder = "home-1"
    spec = changed(small_spec(layers=4, global_batch=64, width=64))
    private = spec.privacy.model_construct(ends=(founder,))
    spec = spec.model_copy(update={"privacy": private})
    scenario = replace(equal_peers(2, latency_ms=0.01, bandwidth_mbps=100_000), head=True)
    one, other = scenario.peers
    scenario = replace(scenario, peers=(one, replace(other, forward_flops=10**6)))
    plan = planned(scenario, spec)
    assert plan.stage_holders() == (founder,)
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.guarding_ns > 0
    assert step.total_ns == plan.predicted_step_ns
