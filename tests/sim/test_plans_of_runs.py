"""Commands plan what daemons do: a run's codecs, its inner steps, its recomputation."""

from dataclasses import replace

import msgspec
import pytest

from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION, Intent, Link, PeerRecord, Reachability
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.sections.privacy_spec import PrivacySpec
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot, sorted_records
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.sim.scenario.execution import AS_RUN, OURS
from p2p_dtfm.sim.scenario.files import read_run_spec, read_scenario
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot, workload_in
from p2p_dtfm.sim.step_time.simulator import simulate_step
from p2p_dtfm.train.stage.emulated import emulated_device
from tests.sim.sim_support import equal_peers, small_spec

FEW_BYTES = {"activations": ("bf16", "int8"), "gradients": ("int8",), "reduction": "sparse"}
LOCAL = {"mode": "local", "inner_steps": 4}


def changed(spec: RunSpec, **sections: object) -> RunSpec:
    return RunSpec.model_validate({**spec.model_dump(), **sections})


def of_daemons(scenario: Scenario, spec: RunSpec) -> Snapshot:
    """What daemons on these machines freeze when they found the run. Records state devices as
    emulated, and links are as probed."""
    records = []
    for peer in scenario.peers:
        others = [other.name for other in scenario.peers if other is not peer]
        ways = {name: (scenario.link(peer.name, name), scenario.link(name, peer.name))
                for name in others}  # fmt: skip
        device = emulated_device(spec, peer.forward_flops or 0, peer.memory_bytes)
        record = PeerRecord(
            peer_id=peer.name,
            life=1,
            sequence=1,
            protocol_version=PROTOCOL_VERSION,
            run_digest=spec.digest(),
            device=msgspec.structs.replace(device, kind="scenario", name=peer.group),
            uplink_bytes_per_s=peer.uplink_bytes_per_s,
            downlink_bytes_per_s=peer.downlink_bytes_per_s,
            links={
                name: Link(out.latency_ns + back.latency_ns, out.bytes_per_s)
                for name, (out, back) in ways.items()
            },
            addresses=(),
            reachability=Reachability.DIRECT,
            intent=Intent.TRAIN,
        )
        records.append(record)
    ordered = sorted_records(records)
    return Snapshot(
        run_digest=spec.digest(),
        workload=workload_of(spec),  # as `Membership` states it
        number=1,
        previous=GENESIS,
        planned=False,
        records=ordered,
        contributors=tuple(Member(record.peer_id, record.life) for record in ordered),
        absent=(),
        step=0,
        present=None,
    )


@pytest.mark.parametrize(
    "sections",
    [{}, {"codecs": FEW_BYTES}, {"sync": LOCAL}, {"codecs": FEW_BYTES, "sync": LOCAL},
     {"codecs": {"activations": "auto"}},
     {"compute": {"recompute": "always"}},
     {"optimizer": {"peak_learning_rate": 1e-3, "kind": "muon"}, "sync": LOCAL,
      "codecs": {"reduction": "sign"}}],
)  # fmt: skip
def test_a_command_plans_from_the_same_bytes_as_a_daemon(sections: dict[str, object]) -> None:
    scenario, spec = read_scenario("three-homes"), changed(small_spec(), **sections)
    told = scenario_snapshot(scenario, spec, AS_RUN)
    assert told.canonical_bytes() == of_daemons(scenario, spec).canonical_bytes()


def test_codecs_and_inner_steps_change_what_is_predicted() -> None:
    """Two peers that each lack the memory for the whole model, over a thin link."""
    limits = "memory_gb = 0.02\nuplink_mbps = 80\ndownlink_mbps = 80"
    scenario = equal_peers(2, limits=limits)
    plain = small_spec(layers=4, global_batch=16)
    took = {}
    for name, sections in {
        "plain": {},
        "int8": {"codecs": {"activations": ("int8",), "gradients": ("int8",)}},
        "local": {"sync": LOCAL},
    }.items():
        spec = changed(plain, compute={"recompute": "never"}, **sections)
        snapshot = scenario_snapshot(
            replace(scenario, peers=tuple(replace(peer, memory_bytes=4 * state_bytes(spec) // 5)
                                          for peer in scenario.peers)), spec, AS_RUN,
        )  # fmt: skip
        plan = compute_plan(snapshot)
        assert isinstance(plan, Plan)
        assert len(plan.pipelines[0].stages) == 2
        took[name] = plan.predicted_step_ns
    assert took["int8"] < took["plain"] < took["local"]


@pytest.mark.parametrize("sync", [{}, LOCAL])
def test_muons_updates_take_time_once_or_in_each_inner_step(sync: dict[str, object]) -> None:
    scenario, took = equal_peers(1), []
    for kind in ("adamw", "muon"):
        optimizer = {"peak_learning_rate": 1e-3, "kind": kind}
        spec = changed(small_spec(layers=4, global_batch=16), sync=sync, optimizer=optimizer)
        snapshot = scenario_snapshot(scenario, spec, AS_RUN)
        plan = compute_plan(snapshot)
        assert isinstance(plan, Plan)
        step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
        assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-3)
        took.append(step.total_ns)
    work, block = snapshot.workload, snapshot.records[0].device.block
    once = 4 * block.forward_ns * work.block_update_ppm // 1_000_000
    assert took[1] - took[0] == pytest.approx(once * max(1, work.inner_steps), rel=1e-2)


def state_bytes(spec: RunSpec) -> int:
    work = workload_of(spec)
    return sum(work.cost(layer).state_bytes for layer in range(work.layer_count))


@pytest.mark.parametrize(("inner_steps", "kind"), [(1, "adamw"), (3, "muon"), (5, "adamw")])
def test_the_simulator_takes_as_long_as_was_predicted(inner_steps: int, kind: str) -> None:
    """Pipelines drain behind each inner step, differences are sparse, and int8 goes between
    stages."""
    spec = changed(
        small_spec(layers=6, global_batch=32),
        codecs=FEW_BYTES,
        sync={"mode": "local", "inner_steps": inner_steps},
        optimizer={"peak_learning_rate": 1e-3, "kind": kind},
    )
    memory = f"memory_gb = {0.7 * state_bytes(spec) / 1e9}\nuplink_mbps = 200"
    scenario = equal_peers(4, latency_ms=1.0, limits=memory)
    plan = compute_plan(scenario_snapshot(scenario, spec, AS_RUN))
    assert isinstance(plan, Plan)
    assert max(len(pipeline.stages) for pipeline in plan.pipelines) > 1
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-3)
    parts = step.compute_ns + step.waiting_ns + step.fill_and_drain_ns + step.reduction_ns
    assert parts + step.guarding_ns + step.commit_ns == step.total_ns


def test_a_sparse_reduction_sends_what_the_run_says_of_it() -> None:
    sparse = {"reduction": "fp32", "sparse": {"one_in": 4, "keep_percent": 50, "bits": 4}}
    spec = changed(small_spec(), codecs=sparse)
    scenario = equal_peers(2)
    plain = scenario_snapshot(scenario, spec, AS_RUN).workload
    coded = scenario_snapshot(scenario, spec, AS_RUN.with_codec("sparse")).workload
    assert plain.gradient_bytes_per_kibi == 4096
    assert coded.gradient_bytes_per_kibi == (128 * 4 + 256) // 8
    assert coded.boundary_wire_bytes == plain.boundary_wire_bytes, "activations know no sparse"
    signs = scenario_snapshot(scenario, spec, AS_RUN.with_codec("sign")).workload
    assert signs.gradient_bytes_per_kibi == 132


def test_where_memory_is_short_a_plan_that_recomputes_is_explained_and_simulated() -> None:
    spec = small_spec(layers=4, global_batch=64, width=256)
    need = state_bytes(spec) + 3 * workload_of(spec).block.saved_bytes
    scenario = equal_peers(2, limits=f"memory_gb = {need / 1e9}")
    snapshot = scenario_snapshot(scenario, spec, AS_RUN)
    plan = compute_plan(snapshot)
    assert isinstance(plan, Plan)
    told = explain(snapshot, plan)
    assert told.step_ns == pytest.approx(plan.predicted_step_ns, rel=1e-2)
    step = simulate_step(plan, scenario, workload_in(scenario, spec, AS_RUN), AS_RUN)
    assert step.total_ns == pytest.approx(plan.predicted_step_ns, rel=1e-2)


def test_what_comparisons_with_the_paper_plan_from_stays_as_it_was() -> None:
    """Such comparisons plan with fp16 and recomputation for all, whatever the run says of them."""
    scenario, spec = read_scenario("three-homes"), small_spec()
    same = scenario_snapshot(scenario, changed(spec, compute={"recompute": "always"}), OURS)
    assert same.workload == scenario_snapshot(scenario, spec, OURS).workload
    assert b"inner_steps" not in same.canonical_bytes()


def private_run() -> RunSpec:
    spec = read_run_spec("gpt2-small-homes")
    return spec.model_copy(update={"privacy": PrivacySpec(ends=("founder",))})


def test_nobody_becomes_the_founder_where_the_first_peer_is_taken_away() -> None:
    scenario = read_scenario("three-homes")
    left = replace(scenario, peers=scenario.peers[1:])
    for smaller in (left, left.with_peers(tuple(peer.name for peer in left.peers))):
        plan = compute_plan(scenario_snapshot(smaller, private_run(), AS_RUN))
        assert isinstance(plan, NoPlan) and "none of them is here to train" in plan.reason


def test_the_first_peer_of_a_scenario_is_the_founder_to_whom_ends_are_left() -> None:
    scenario, private = read_scenario("three-homes"), private_run()
    plan = compute_plan(scenario_snapshot(scenario, private, AS_RUN))
    assert isinstance(plan, Plan), plan.reason
    first = scenario.peers[0].name
    told = explain(scenario_snapshot(scenario, private, AS_RUN), plan).text()
    assert told.count("(privacy.ends), and there is no place between them") == 5
    assert "does not fit in memory" not in told
    assert {stage.peer_id for p in plan.pipelines for stage in (p.stages[0], p.stages[-1])} == {
        first
    }
