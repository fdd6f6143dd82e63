"""The simulator against times worked out by hand, and what must hold of every step."""

import itertools
import json
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.cost_model import cuts
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.named_plans import grid_plan, region_order
from p2p_dtfm.sim.scenario.execution import DTFM, OURS, Communicator, Execution
from p2p_dtfm.sim.scenario.scenario import Scenario, parse_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.sim.step_time.timeline import StepTime
from p2p_dtfm.sim.step_time.trace import trace_json
from tests.sim.sim_support import equal_peers, small_spec

MESSAGE_NS = 100_000
"""The time that a message takes besides its bytes."""


def run(
    scenario: Scenario,
    stages: int,
    spec: RunSpec | None = None,
    execution: Execution = OURS,
    in_flight: int | None = None,
    trace: bool = False,
) -> tuple[StepTime, Workload]:
    workload = workload_in(scenario, spec or small_spec(), execution)
    plan = grid_plan(region_order(scenario), workload, stages)
    if in_flight is not None:
        plan = with_in_flight(plan, in_flight)
    return simulate_step(plan, scenario, workload, execution, trace=trace), workload


def with_in_flight(plan: Plan, count: int) -> Plan:
    pipelines = tuple(
        msgspec.structs.replace(
            pipeline,
            stages=tuple(msgspec.structs.replace(s, in_flight=count) for s in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    return msgspec.structs.replace(plan, pipelines=pipelines)


def stage_ns(step: StepTime) -> tuple[int, int]:
    return step.stages[0].work.timing.forward_ns, step.stages[0].work.timing.backward_ns


def test_one_peer_alone_computes_and_nothing_else() -> None:
    step, _ = run(equal_peers(1), 1)
    forward, backward = stage_ns(step)
    assert backward == 3 * forward
    assert step.total_ns == step.compute_ns == 16 * (forward + backward)
    assert (step.waiting_ns, step.fill_and_drain_ns, step.reduction_ns, step.commit_ns) == (0,) * 4


def test_one_microbatch_through_two_stages_takes_the_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    lagging, _ = run(equal_peers(2), 2, small_spec(global_batch=1))
    assert lagging.guarding_ns == 0, "to wait for guardians would take half of the step"
    monkeypatch.setattr(cuts, "LAGGING_STEP_SHARE", 0)
    step, workload = run(equal_peers(2), 2, small_spec(global_batch=1))
    hop = workload.boundary_bytes // 2 * 10 + MESSAGE_NS + 10_000_000  # fp16 at 100 MB/s, 10 ms
    compute = sum(s.work.timing.forward_ns + s.work.timing.backward_ns for s in step.stages)
    assert step.pipelines_done_ns == compute + 2 * hop
    assert step.total_ns == step.pipelines_done_ns + step.guarding_ns + step.commit_ns
    assert step.commit_ns == 10_000_000
    guarded = step.links["home-1", "home-2"][0] - workload.boundary_bytes // 2
    assert guarded > 4 * workload.embedding.parameter_count
    there = guarded * 10 + MESSAGE_NS + 20_000_000  # fp32, and a receipt; the first stage ends last
    assert step.guarding_ns == there


def test_in_flight_one_pays_the_whole_round_trip_for_every_microbatch() -> None:
    one, _ = run(equal_peers(2), 2, small_spec(global_batch=1))
    many, _ = run(equal_peers(2), 2, small_spec(global_batch=8), in_flight=1)
    assert many.pipelines_done_ns == 8 * one.pipelines_done_ns
    deep, _ = run(equal_peers(2), 2, small_spec(global_batch=8))
    assert deep.pipelines_done_ns < many.pipelines_done_ns / 2


def test_a_pipeline_with_enough_in_flight_is_bound_by_computing() -> None:
    spec = small_spec(layers=8, global_batch=256, width=1024)
    step, _ = run(equal_peers(4, latency_ms=50), 4, spec)
    busiest = max(stage.busy_ns for stage in step.stages)
    assert step.compute_ns == busiest
    assert step.waiting_ns < busiest // 50
    starved, _ = run(equal_peers(4, latency_ms=50), 4, spec, in_flight=2)
    assert starved.waiting_ns > busiest


def test_stages_take_turns_so_that_none_starves_those_after_it() -> None:
    """With backwards always first the step took 1.6 times as long as computing alone."""
    spec = small_spec(layers=11, global_batch=128, width=1024)
    step, _ = run(equal_peers(6, latency_ms=20), 6, spec, in_flight=16)
    assert step.pipelines_done_ns < 1.15 * step.compute_ns


@pytest.mark.parametrize("in_flight", [1, 2, 3, 5])
def test_a_stage_never_holds_more_than_the_plan_says(in_flight: int) -> None:
    step, _ = run(equal_peers(4), 4, in_flight=in_flight)
    assert max(stage.peak_in_flight for stage in step.stages) == in_flight


def test_gpipe_holds_a_whole_flush_and_drains_between_flushes() -> None:
    gpipe = replace(OURS, order="gpipe", flush_microbatches=8)
    step, _ = run(equal_peers(4), 4, execution=gpipe)
    assert {stage.peak_in_flight for stage in step.stages} == {8}
    whole, _ = run(equal_peers(4), 4, execution=replace(gpipe, flush_microbatches=0))
    assert whole.pipelines_done_ns < step.pipelines_done_ns


def flat(kind: str, scenario: Scenario) -> int:
    execution = replace(OURS.with_reduction(kind), overlap="stage")
    step, _ = run(scenario, 1, execution=execution)
    return step.reduction_ns


def test_reductions_take_what_they_should_on_equal_links() -> None:
    scenario = equal_peers(4, latency_ms=10)
    spec = small_spec()
    workload = workload_in(scenario, spec, OURS)
    values = sum(workload.cost(layer).parameter_count for layer in range(6))
    gradient = 2 * values  # fp16
    whole_ns = gradient * 10  # at 100 MB/s
    hop_ns = 10_000_000 + MESSAGE_NS
    assert flat("flat", scenario) == pytest.approx(2 * (whole_ns / 4 + hop_ns), rel=1e-3)
    assert flat("weighted", scenario) == pytest.approx(2 * (whole_ns / 4 + hop_ns), rel=1e-3)
    assert flat("central", scenario) == pytest.approx(2 * (whole_ns + hop_ns), rel=1e-3)
    assert flat("hierarchical", scenario) == pytest.approx(2 * (whole_ns + hop_ns), rel=1e-3)
    assert flat("chain", scenario) == pytest.approx(2 * whole_ns + 6 * 10_000_000, rel=1e-3)


def test_a_shared_uplink_makes_a_reduction_pay_for_all_its_links() -> None:
    free = flat("flat", equal_peers(4, latency_ms=0))
    shared = flat("flat", equal_peers(4, latency_ms=0, limits="uplink_mbps = 800.0"))
    assert shared == pytest.approx(3 * free, rel=0.1)


UNEVEN_LINKS = """
name = "uneven"
[workload]
head = false
[[group]]
name = "near"
count = 4
forward_tflops = 1.0
[[group]]
name = "far"
count = 2
forward_tflops = 1.0
[[link]]
from = "*"
to = "*"
latency_ms = 1.0
bandwidth_mbps = 400.0
[[link]]
from = "far"
to = "far"
latency_ms = 1.0
bandwidth_mbps = 100.0
"""


def test_weighted_parts_spare_the_slow_links() -> None:
    scenario = parse_scenario(UNEVEN_LINKS, "uneven.toml")
    spec = small_spec(width=1024)
    even, _ = run(scenario, 1, spec, OURS.with_reduction("flat"))
    weighted, _ = run(scenario, 1, spec, OURS)
    central, _ = run(scenario, 1, spec, OURS.with_reduction("central"))
    assert weighted.reduction_ns < 0.5 * even.reduction_ns
    assert weighted.reduction_ns < central.reduction_ns


def test_overlap_lets_a_segment_reduce_beside_other_pipelines() -> None:
    # the last stage holds nearly everything, and is done before the first
    scenario = equal_peers(4, latency_ms=200, bandwidth_mbps=100)
    workload = workload_in(scenario, small_spec(), OURS)
    plan = Plan(
        tuple(
            Pipeline((Stage(first, 0, 1, 9), Stage(last, 1, 6, 9)), 8 * number, 8)
            for number, (first, last) in enumerate((("home-1", "home-2"), ("home-3", "home-4")))
        ),
        (),
        0,
    )
    beside = simulate_step(plan, scenario, workload, OURS)
    after = simulate_step(plan, scenario, workload, replace(OURS, overlap="none"))
    assert beside.pipelines_done_ns == after.pipelines_done_ns
    assert beside.reduction_ns < after.reduction_ns - 100_000_000


def test_halving_the_bytes_of_values_halves_the_time_of_links() -> None:
    scenario = equal_peers(2, latency_ms=0)
    wide = replace(OURS, gradient_codec="fp32")
    assert flat("flat", scenario) == pytest.approx(
        run(scenario, 1, execution=wide.with_reduction("flat"))[0].reduction_ns / 2, rel=0.05
    )


def test_uneven_pipelines_segments_and_spares_are_all_simulated() -> None:
    scenario, spec = equal_peers(4), small_spec(layers=3, global_batch=5)
    workload = workload_in(scenario, spec, OURS)
    plan = Plan(
        (
            Pipeline((Stage("home-1", 0, 2, 3), Stage("home-2", 2, 5, 2)), 0, 3),
            Pipeline((Stage("home-3", 0, 5, 1),), 3, 2),
        ),
        ("home-4",),
        0,
    )
    step = simulate_step(plan, scenario, workload, OURS)
    assert step.microbatches == 5
    assert [len(span.holders) for span in step.reductions] == [2, 2]
    assert {stage.work.name for stage in step.stages} == {"home-1", "home-2", "home-3"}


def test_dtfms_transport_computes_nothing_while_it_sends() -> None:
    # nothing buffered, nothing in flight: each stage receives, computes, sends, in turn
    strict = Communicator(efficiency=1.0, receive_buffer_bytes=0, window_bytes=0)
    execution = replace(DTFM, communicator=strict)
    step, workload = run(equal_peers(3, latency_ms=0), 3, small_spec(layers=3), execution)
    message = workload.boundary_bytes // 2 * 10
    middle = step.stages[1].work.timing
    forwards = 15 * (2 * message + middle.forward_ns)
    backwards = 15 * (2 * message + middle.backward_ns)
    once = 2 * (2 * message) + sum(
        s.work.timing.forward_ns + s.work.timing.backward_ns for s in step.stages
    )
    assert step.pipelines_done_ns == pytest.approx(once + forwards + backwards, rel=0.02)


def test_dtfms_execution_does_whole_flushes_only() -> None:
    execution = replace(DTFM, flush_microbatches=7)
    step, _ = run(equal_peers(2), 2, small_spec(global_batch=16), execution)
    assert step.microbatches == 14
    assert step.stages[0].busy_ns == 14 * sum(stage_ns(step))


@pytest.mark.parametrize("execution", [OURS, DTFM, replace(OURS, order="gpipe", overlap="none")])
def test_parts_add_up_and_repeat(execution: Execution) -> None:
    scenario = equal_peers(6, bandwidth_mbps=50)
    step, _ = run(scenario, 3, execution=execution)
    parts = (
        step.compute_ns,
        step.waiting_ns,
        step.fill_and_drain_ns,
        step.reduction_ns,
        step.commit_ns,
    )
    assert min(parts) >= 0
    assert sum(parts) == step.total_ns
    again, _ = run(scenario, 3, execution=execution)
    assert again.total_ns == step.total_ns


@settings(max_examples=40, deadline=None)
@given(
    peers=st.integers(1, 8),
    stages=st.integers(1, 4),
    batch=st.integers(8, 24),
    latency_ms=st.sampled_from([0.0, 3.0, 80.0]),
    mbps=st.sampled_from([5.0, 100.0, 5000.0]),
    uplink=st.sampled_from(["", "uplink_mbps = 50.0", "uplink_mbps = 9.0\ndownlink_mbps = 60.0"]),
    in_flight=st.integers(1, 6),
    kind=st.sampled_from(["flat", "weighted", "central", "hierarchical", "chain"]),
)
def test_every_step_ends_and_respects_computing_and_order(
    peers: int,
    stages: int,
    batch: int,
    latency_ms: float,
    mbps: float,
    uplink: str,
    in_flight: int,
    kind: str,
) -> None:
    stages = min(stages, peers)
    scenario = equal_peers(peers, latency_ms, mbps, uplink)
    execution = OURS.with_reduction(kind)
    step, _ = run(
        scenario, stages, small_spec(global_batch=batch), execution, in_flight, trace=True
    )
    assert step.total_ns >= max(stage.busy_ns for stage in step.stages)
    by_place = {(s.work.pipeline, s.work.position): s for s in step.stages}
    for stage in step.stages:
        work, tasklets = stage.work, stage.tasklets
        assert tasklets is not None
        assert len(tasklets) == 2 * work.microbatches
        assert stage.busy_ns == work.microbatches * (
            work.timing.forward_ns + work.timing.backward_ns
        )
        for before, after in itertools.pairwise(tasklets):
            assert before[3] <= after[2], "one tasklet at a time"
        ends = {(backward, number): end for backward, number, _, end in tasklets}
        following = by_place.get((work.pipeline, work.position + 1))
        if following is not None and following.tasklets is not None:
            for backward, number, start, _ in following.tasklets:
                if not backward:
                    assert start >= ends[False, number], "no input before it was computed"


def test_the_trace_is_the_trace_event_format() -> None:
    scenario = equal_peers(4)
    step, _ = run(scenario, 2, trace=True)
    trace = json.loads(json.dumps(trace_json(step, scenario)))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    computed = [event for event in spans if event["cat"] in ("forward", "backward")]
    assert len(computed) == 2 * 2 * 16
    assert sum(event["dur"] for event in computed) == pytest.approx(
        sum(stage.busy_ns for stage in step.stages) / 1000
    )
    assert max(event["ts"] + event["dur"] for event in spans) == step.total_ns / 1000
    assert {event["cat"] for event in spans} == {"forward", "backward", "reduction", "commit"}
