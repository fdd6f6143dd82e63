"""A scenario as a snapshot that the planner can plan from."""

from dataclasses import replace

import pytest

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.plan import Plan, check_plan
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.execution import DTFM, OURS
from p2p_dtfm.sim.scenario.files import read_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from tests.sim.sim_support import equal_peers, small_spec


def test_timings_follow_operations_and_rate() -> None:
    scenario, spec = equal_peers(2), small_spec()
    block = workload_of(spec).block
    device = scenario_snapshot(scenario, spec).records[0].device
    assert device.block.forward_ns == -(-block.forward_flops // 1000)  # 10^12 operations/s
    assert device.block.backward_ns == 3 * device.block.forward_ns
    device = scenario_snapshot(scenario, spec, replace(OURS, recompute=False)).records[0].device
    assert device.block.backward_ns == 2 * device.block.forward_ns


def test_links_and_limits_reach_the_records() -> None:
    scenario = read_scenario("three-homes")
    snapshot = scenario_snapshot(scenario, small_spec())
    london = snapshot.record("london-1")
    assert london.uplink_bytes_per_s == 2_500_000
    assert london.links["tokyo-2"].round_trip_ns == 210_000_000
    assert london.links["tokyo-2"].bytes_per_s == 45_750_000
    assert set(london.links) == {peer.name for peer in scenario.peers} - {"london-1"}


def test_the_same_scenario_gives_the_same_snapshot() -> None:
    one = scenario_snapshot(read_scenario("uneven-world"), small_spec())
    two = scenario_snapshot(read_scenario("uneven-world"), small_spec())
    assert one.digest() == two.digest()


def test_the_planner_plans_a_scenario() -> None:
    scenario, spec = read_scenario("three-homes"), small_spec()
    snapshot = scenario_snapshot(scenario, spec)
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    members = {peer.name for peer in scenario.peers}
    check_plan(plan, snapshot.workload.layer_count, spec.microbatches_per_step, members)


def test_codecs_and_recomputation_change_bytes_but_not_what_state_takes() -> None:
    scenario, spec = equal_peers(2), small_spec()
    plain = workload_of(spec)
    coded = scenario_snapshot(scenario, spec).workload
    assert coded.boundary_bytes == plain.boundary_bytes // 2
    assert coded.block.parameter_count == plain.block.parameter_count // 2
    assert coded.block.state_bytes == plain.block.state_bytes
    assert coded.block.saved_bytes == plain.boundary_bytes
    kept = workload_in(scenario, spec, replace(OURS, recompute=False))
    assert kept.block.saved_bytes == plain.block.saved_bytes


def test_the_papers_runs_have_no_language_model_head() -> None:
    spec = small_spec()
    whole = read_scenario("three-homes")
    assert workload_in(whole, spec, OURS).head == workload_of(spec).head
    assert workload_in(whole, spec, DTFM).head.parameter_count == 2 * spec.model.width


def test_a_group_to_be_measured_needs_a_measurement() -> None:
    scenario = equal_peers(2)
    peers = tuple(replace(peer, forward_flops=None) for peer in scenario.peers)
    scenario = replace(scenario, peers=peers)
    with pytest.raises(UserError, match="measured = true"):
        scenario_snapshot(scenario, small_spec())


def test_a_peer_that_takes_lifetimes_for_a_layer_is_refused() -> None:
    """Its time for a layer was beyond 2^64 ns, and the command ended with `OverflowError`."""
    scenario, whole = equal_peers(2), small_spec()
    peers = tuple(replace(peer, forward_flops=1) for peer in scenario.peers)
    batch = whole.batch.model_copy(update={"global_batch": 1 << 16, "microbatch": 1 << 16})
    spec = whole.model_copy(update={"batch": batch})
    with pytest.raises(UserError, match="lifetimes"):
        compute_plan(scenario_snapshot(replace(scenario, peers=peers), spec))
