"""Where a step goes, stage by stage."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.sim.paper.named_plans import grid_plan, region_order
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioLink
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.stage_shares import mean_parts, stage_shares
from p2p_dtfm.sim.step_time.timeline import StepTime


def traced(scenario: Scenario, run: str, plan: Plan | None = None) -> StepTime:
    spec = read_run_spec(run)
    if plan is None:
        found = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
        assert isinstance(found, Plan)
        plan = found
    return simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN, trace=True)


def one_pipeline(stages: int) -> tuple[Scenario, Plan]:
    """The peers and links of three-homes, with the layers of gpt2-small."""
    scenario = read_scenario("three-homes")
    scenario = scenario.with_peers(region_order(scenario)[:stages])
    workload = workload_in(scenario, read_run_spec("gpt2-small"), AS_RUN)
    return scenario, grid_plan(region_order(scenario), workload, stages)


@pytest.mark.parametrize("run", ["tiny", "gpt2-small", "gpt2-small-homes"])
def test_the_parts_of_each_stage_are_the_whole_step(run: str) -> None:
    step = traced(read_scenario("three-homes"), run)
    for share, stage in zip(stage_shares(step), step.stages, strict=True):
        assert share.peer == stage.work.name
        assert share.parts.total_ns == step.total_ns
        assert all(value >= 0 for value in share.parts.values().values()), share
        assert share.parts.computing_ns == stage.busy_ns


def with_lines(scenario: Scenario, bytes_per_s: int) -> Scenario:
    """The scenario with all lines alike, and no latency."""
    peers = (
        replace(
            peer,
            uplink_bytes_per_s=bytes_per_s,
            downlink_bytes_per_s=bytes_per_s,
            link_cap_bytes_per_s=bytes_per_s,
        )
        for peer in scenario.peers
    )
    links = {ends: ScenarioLink(0, bytes_per_s) for ends in scenario.links}
    return replace(scenario, peers=tuple(peers), links=links)


def test_slow_lines_are_waited_for_as_lines() -> None:
    scenario, plan = one_pipeline(3)
    parts = mean_parts(stage_shares(traced(scenario, "gpt2-small", plan)))
    assert parts.transfer_ns > 0.7 * parts.total_ns, "home lines hold up fast machines"
    fast = with_lines(scenario, 10**12)
    parts = mean_parts(stage_shares(traced(fast, "gpt2-small", plan)))
    assert parts.transfer_ns < 0.01 * parts.total_ns < parts.computing_ns


def test_a_slow_neighbour_is_waited_for_as_a_neighbour() -> None:
    scenario, plan = one_pipeline(3)
    peers = (
        replace(peer, forward_flops=(peer.forward_flops or 0) // (10 if at == 1 else 1))
        for at, peer in enumerate(scenario.peers)
    )
    slow = with_lines(replace(scenario, peers=tuple(peers)), 10**12)
    first, middle, last = (share.parts for share in stage_shares(traced(slow, "gpt2-small", plan)))
    for each in (first, last):
        assert each.others_ns > 0.5 * each.total_ns > each.computing_ns
    assert middle.computing_ns > 0.9 * middle.total_ns


def test_the_slower_replica_is_waited_for_before_the_sums_are() -> None:
    """One of two replicas has a tenth of the speed; the other waits for this replica, not for a
    line."""
    scenario = read_scenario("three-homes")
    names = region_order(scenario)[:2]
    scenario = with_lines(scenario.with_peers(names), 10**12)
    peers = (
        replace(peer, forward_flops=(peer.forward_flops or 0) // (10 if at else 1))
        for at, peer in enumerate(scenario.peers)
    )
    slow = replace(scenario, peers=tuple(peers))
    plan = grid_plan(names, workload_in(slow, read_run_spec("gpt2-small"), AS_RUN), 1)
    fast, late = (share.parts for share in stage_shares(traced(slow, "gpt2-small", plan)))
    assert fast.others_ns > 0.8 * fast.total_ns
    assert late.others_ns < 0.01 * late.total_ns
    assert fast.reduction_ns == late.reduction_ns > 0


def test_a_mean_adds_up_too() -> None:
    step = traced(read_scenario("three-homes"), "gpt2-small-homes")
    assert mean_parts(stage_shares(step)).total_ns == pytest.approx(step.total_ns)
