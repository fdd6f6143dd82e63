"""What the benchmarks with real daemons work out from their measurements."""

import pytest

from benchmarks.bubbles import busy_s, lost_parts_s, unavoidable_parts_s
from benchmarks.daemon_with_plan import execute_as_dtfm
from benchmarks.emulated_swarm import (
    EXECUTION,
    Span,
    emulated_spec,
    renamed,
    scenario_file,
    slowed,
)
from benchmarks.memory import at, must_hold_bytes
from benchmarks.placement_daemons import flushed, plan_named, simulated_ns
from benchmarks.prediction import SCENARIO_NAMES
from p2p_dtfm.core.planner import wire_plan
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.core.schedule.pipeline_order import StageOrder
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step

PLAN = Plan((Pipeline((Stage("a", 0, 2, 3), Stage("b", 2, 4, 2)), 0, 4),), ("c",), 7)


def test_every_scenario_has_a_plan_for_eight_peers() -> None:
    for name in SCENARIO_NAMES:
        scenario = scenario_file(name)
        assert len(scenario.peers) == 8
        plan = compute_plan(scenario_snapshot(scenario, emulated_spec(), EXECUTION))
        assert isinstance(plan, Plan), f"{name}: {plan.reason}"
        assert max(len(pipeline.stages) for pipeline in plan.pipelines) > 1, name


def test_spans_that_overlap_count_once() -> None:
    second = 1_000_000_000
    spans = [
        Span("reduce", 0, 0, 2 * second),
        Span("reduce", 1, second, 3 * second),
        Span("wait", 0, 3 * second, 9 * second),
        Span("reduce", 2, 5 * second, 6 * second),
    ]
    assert busy_s(spans, "reduce") == pytest.approx(4.0)


def test_what_a_peer_loses_falls_into_parts() -> None:
    second = 1_000_000_000
    before = [Span("commit", 0, 0, second), Span("apply", 0, second, 2 * second)]
    spans = [
        Span("wait", 0, 3 * second, 5 * second),
        Span("forward", 0, 6 * second, 8 * second),
        Span("wait", 0, 8 * second, 9 * second),
        Span("backward", 0, 11 * second, 15 * second),
        Span("reduce", 0, 14 * second, 17 * second),
        Span("commit", 0, 18 * second, 20 * second),
        Span("apply", 0, 20 * second, 21 * second),
    ]
    parts = lost_parts_s(before, spans)
    expected = {"start": 1, "fill": 3, "waiting": 1, "between": 2, "tail": 3, "commit": 2}
    assert parts == pytest.approx(expected)
    busy = busy_s(spans, "forward", "backward", "apply")
    assert sum(parts.values()) + busy == pytest.approx(20 - 1)  # from commit to commit


def test_what_must_be_lost_falls_into_the_same_parts() -> None:
    scenario, spec = scenario_file("one-room"), emulated_spec()
    workload = workload_in(scenario, spec, EXECUTION)
    plan = plan_named("region", scenario, spec)
    simulated = simulate_step(plan, scenario, workload, EXECUTION, trace=True)
    for stage in simulated.stages:
        parts = unavoidable_parts_s(simulated, stage)
        assert sum(parts.values()) == pytest.approx((simulated.total_ns - stage.busy_ns) / 1e9)
        assert all(value >= 0 for value in parts.values())


def test_a_slowed_scenario_takes_so_many_times_longer() -> None:
    scenario, spec = scenario_file("uneven-homes"), emulated_spec()
    plan = plan_named("region", scenario, spec)
    once, thrice = (simulated_ns(plan, slowed(scenario, n), spec, "region") for n in (1, 3))
    assert thrice == pytest.approx(3 * once, rel=0.01)


def test_a_plan_keeps_its_shape_under_other_names() -> None:
    names = {"a": "x", "b": "y", "c": "z"}
    back = {new: old for old, new in names.items()}
    assert renamed(renamed(PLAN, names), back) == PLAN
    assert renamed(PLAN, names).spares == ("z",)


def test_a_guardian_must_hold_more() -> None:
    spec = emulated_spec(blocks=2)
    workload = workload_of(spec)
    alone, same = must_hold_bytes(spec, PLAN, "a", [0, 1])
    _, with_guard = must_hold_bytes(spec, PLAN, "a", [0, 1, 2])
    assert same == alone, "its own sums are counted with its stage"
    assert with_guard - same == 20 * workload.block.parameter_count
    assert at({1: 10, 5: 50, 9: 90}, 7) == 50


def test_dtfm_flushes_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_forward_can_run", "_backward_can_run"):
        monkeypatch.setattr(StageOrder, name, getattr(StageOrder, name))
    monkeypatch.setattr(wire_plan, "_weights", wire_plan._weights)
    execute_as_dtfm()
    depth = flushed(PLAN).pipelines[0].stages[0].in_flight
    order = StageOrder(range(5), depth, makes_inputs=True, makes_losses=True)
    done = []
    while not order.done:
        tasklet = order.next()
        assert tasklet is not None
        done.append(f"{tasklet.kind.value[0]}{tasklet.microbatch}")
    assert done == ["f0", "f1", "b0", "b1", "f2", "f3", "b2", "b3", "f4", "b4"]


def test_dtfm_reduces_in_equal_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_forward_can_run", "_backward_can_run"):
        monkeypatch.setattr(StageOrder, name, getattr(StageOrder, name))
    monkeypatch.setattr(wire_plan, "_weights", wire_plan._weights)
    execute_as_dtfm()
    scenario, spec = scenario_file("uneven-homes"), emulated_spec()
    plan = plan_named("dtfm", scenario, spec)
    wire = wire_plan.wire_plan(spec, plan, scenario_snapshot(scenario, spec, EXECUTION))
    for chunks in wire.chunks.values():
        owned = dict.fromkeys(chunks.owners, 0)
        for (start, end), owner in zip(chunks.bounds, chunks.owners, strict=True):
            owned[owner] += end - start
        assert len(owned) == 2 and max(owned.values()) - min(owned.values()) <= len(chunks.bounds)


def test_the_grids_to_compare_with_are_simulated() -> None:
    scenario, spec = scenario_file("straggler"), emulated_spec()
    seconds = {
        kind: simulated_ns(plan_named(kind, scenario, spec), scenario, spec, kind)
        for kind in ("ours", "region", "dtfm")
    }
    assert seconds["region"] > 2 * seconds["ours"]
    assert seconds["dtfm"] > 2 * seconds["ours"]
