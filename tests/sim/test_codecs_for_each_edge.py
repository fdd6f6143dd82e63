"""Where a run allows several codecs, the plan says which for each boundary, and counts it."""

import math
from itertools import pairwise

import msgspec
import pytest

from p2p_dtfm.core.cost_model.codings import coding_of, codings_of
from p2p_dtfm.core.cost_model.edge_codecs import uniform_choices
from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.planner.wire_plan import BoundaryCodecs, wire_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import AUTO_CODECS, Codec, CodecSpec, RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import AllowedCodecs, Workload, workload_of
from p2p_dtfm.sim.advice.sweep import sent_bytes
from p2p_dtfm.sim.scenario.execution import AS_RUN
from p2p_dtfm.sim.scenario.scenario import Scenario, parse_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import (
    activation_bytes,
    scenario_snapshot,
    workload_in,
)
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.train.codecs import codec_of
from tests.sim.sim_support import small_spec

TWO_HOUSES = """
name = "two-houses"
[workload]
head = false
[[group]]
name = "here"
count = 2
forward_tflops = 0.0002
memory_gb = {memory_gb}
[[group]]
name = "there"
count = 2
forward_tflops = 0.0002
memory_gb = {memory_gb}
[[link]]
from = "*"
to = "*"
latency_ms = 0.1
bandwidth_mbps = 1000
[[link]]
from = "here"
to = "there"
latency_ms = 5
both = true
bandwidth_mbps = {between_mbps}
"""


def run_of(codecs: object, global_batch: int = 32) -> RunSpec:
    """A run of eight blocks, of which each peer has memory for two."""
    plain = small_spec(layers=8, global_batch=global_batch, width=64).model_dump()
    told = {"activations": codecs, "gradients": codecs}
    sections = {"codecs": told, "compute": {"recompute": "never"}}
    return RunSpec.model_validate(plain | sections | {"model": plain["model"] | {"context": 8}})


def houses(spec: RunSpec, between_mbps: float = 0.26) -> Scenario:
    block = workload_of(spec).block
    need = 2.4 * block.state_bytes + 18 * block.saved_bytes
    return parse_scenario(
        TWO_HOUSES.format(memory_gb=need / 1e9, between_mbps=between_mbps), "houses.toml"
    )


def planned(snapshot: Snapshot) -> Plan:
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    return plan


def step_ns_with(snapshot: Snapshot, *codecs: Codec) -> int:
    """The step time of the best plan with these codecs; coding is counted even where there is only
    one."""
    work = msgspec.structs.replace(
        snapshot.workload, boundary_bytes_per_kibi=AllowedCodecs(codecs, codecs)
    )
    return planned(msgspec.structs.replace(snapshot, workload=work)).predicted_step_ns


def test_few_bytes_on_slow_edges_alone_beat_either_codec_everywhere() -> None:
    spec = run_of(["bf16", "int8"])
    scenario = houses(spec)
    snapshot = scenario_snapshot(scenario, spec, AS_RUN)
    plan = planned(snapshot)
    everywhere = {codec: step_ns_with(snapshot, codec) for codec in ("bf16", "int8")}
    assert plan.predicted_step_ns < min(everywhere.values()), everywhere
    (pipeline,) = plan.pipelines
    houses_of = [stage.peer_id.split("-")[0] for stage in pipeline.stages]
    assert len(set(houses_of)) == 2
    for here, there, codecs in zip(
        *zip(*pairwise(houses_of), strict=True), pipeline.codecs, strict=True
    ):
        assert codecs == (("bf16", "bf16") if here == there else ("int8", "int8"))
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-3)


@pytest.mark.parametrize(("between_mbps", "codec"), [(10, "fp32"), (0.5, "bf16"), (0.26, "int8")])
def test_what_the_run_would_rather_have_unless_it_holds_up_the_pipeline(
    between_mbps: float, codec: Codec
) -> None:
    """This holds where microbatches are many. Of few, filling the pipeline may take most of the
    step."""
    spec = run_of("auto", global_batch=256)
    assert spec.codecs.activations == AUTO_CODECS == spec.codecs.gradients
    snapshot = scenario_snapshot(houses(spec, between_mbps), spec, AS_RUN)
    plan = planned(snapshot)
    chosen = [names for pipeline in plan.pipelines for names in pipeline.codecs]
    assert len(chosen) == 3 and (codec, codec) in chosen
    assert chosen.count(("fp32", "fp32")) >= 2


def test_everyone_follows_the_plan_and_is_told_of_it() -> None:
    spec = run_of(["fp32", "int8"])
    snapshot = scenario_snapshot(houses(spec, 0.26), spec, AS_RUN)
    plan = planned(snapshot)
    (pipeline,) = plan.pipelines
    wire = wire_plan(spec, plan, snapshot)
    ids = [stage.peer_id for stage in pipeline.stages]
    edges = list(pairwise(ids))
    assert [wire.boundaries[edge] for edge in edges] == [
        BoundaryCodecs(*names) for names in pipeline.codecs
    ]
    slow = pipeline.codecs.index(("int8", "int8"))
    told = explain(snapshot, plan)
    assert told.step_ns == pytest.approx(plan.predicted_step_ns, rel=1e-2)
    assert f"sends to {ids[slow + 1]} in int8, back in int8 (" in told.text()
    work, count = snapshot.workload, pipeline.microbatch_count
    sizes = {name: coding_of(work, name).wire_bytes for name in ("fp32", "int8")}
    assert sent_bytes(snapshot, plan) == count * sum(
        sizes[name] for names in pipeline.codecs for name in names
    )


def test_a_plan_in_force_goes_on_with_other_codecs_where_links_have_changed() -> None:
    """Nobody moves for other codecs, so nothing speaks against them."""
    spec = run_of("auto")
    before = planned(scenario_snapshot(houses(spec, 10), spec, AS_RUN))
    now = scenario_snapshot(houses(spec, 0.26), spec, AS_RUN)
    after = planned(msgspec.structs.replace(now, present=before, planned=True))
    assert after.pipelines != before.pipelines
    assert {names for pipeline in after.pipelines for names in pipeline.codecs} > {("int8", "int8")}


def test_one_codec_each_way_leaves_no_choice() -> None:
    words = CodecSpec.model_validate({"activations": "int8", "gradients": "bf16"})
    assert words == CodecSpec(activations=("int8",), gradients=("bf16",))
    spec = run_of("int8")
    snapshot = scenario_snapshot(houses(spec), spec, AS_RUN)
    assert codings_of(snapshot.workload) is None
    plan = planned(snapshot)
    assert not any(pipeline.codecs for pipeline in plan.pipelines)
    assert b"codecs" not in msgspec.msgpack.encode(plan)


def test_uniform_choices_use_the_least_where_gradients_may_not() -> None:
    work = workload_of(run_of("auto"))
    allowed = AllowedCodecs(("fp32", "int8"), ("fp32", "fp16"))
    changed: Workload = msgspec.structs.replace(work, boundary_bytes_per_kibi=allowed)
    codings = codings_of(changed)
    assert codings is not None
    names = [edge.names for edge in uniform_choices(codings)]
    assert names == [("fp32", "fp32"), ("int8", "fp16")]
    assert changed.boundary_wire_bytes == coding_of(changed, "fp16").wire_bytes


def test_below_int8_where_the_link_is_slower_yet_and_the_run_allows_it() -> None:
    """Such a codec takes an eighth of the bytes, also where the simulated run has other codecs."""
    spec = run_of(["fp32", "int8", "subspace"], global_batch=256)
    scenario = houses(spec, 0.05)
    snapshot = scenario_snapshot(scenario, spec, AS_RUN)
    plan = planned(snapshot)
    (pipeline,) = plan.pipelines
    assert ("subspace", "subspace") in pipeline.codecs and ("fp32", "fp32") in pipeline.codecs
    sizes = {
        name: coding_of(snapshot.workload, name).wire_bytes
        for name in ("fp32", "rotated6", "rotated4", "subspace")
    }
    values = math.prod(spec.boundary_shape(1))
    for name, size in sizes.items():
        assert 0 <= codec_of(name, spec.codecs).payload_bytes(values) - size <= 8
    assert sizes["fp32"] > 8.5 * sizes["subspace"] > 5 * sizes["rotated6"]
    less = step_ns_with(snapshot, "fp32", "int8")
    assert plan.predicted_step_ns < less
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-3)
    for name in ("rotated4", "subspace"):
        asked = AS_RUN.with_codec(name)
        assert activation_bytes(snapshot.workload, asked) == sizes[name]
        assert asked.gradient_codec is None, "the reduction has none of these"
