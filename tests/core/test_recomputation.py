"""A stage recomputes where memory would starve its pipeline, and only there."""

import random

import msgspec
import pytest

from p2p_dtfm.core.cost_model.guardians import guarded_pairs, guards_in
from p2p_dtfm.core.cost_model.guarding import Guarding
from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.planner.recomputation import must_recompute, problem_in_force
from p2p_dtfm.core.protocol.facts.in_words import bytes_text
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage
from p2p_dtfm.core.protocol.records import Device, Link, PeerRecord
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Snapshot
from p2p_dtfm.core.protocol.workload import workload_of
from tests.core.builders import run_spec
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot, workload

FAR = Link(round_trip_ns=200_000_000, bytes_per_s=1_000_000_000)


def swarm(memory_bytes: int, recompute: str, link: Link = FAR) -> Snapshot:
    """Two peers for 14 layers of 64 MiB, with 16 MiB beside each for its sums in a plan of one
    pipeline. A microbatch takes 40 MiB, of which 1 MiB are the input. Neither peer can hold the
    model alone."""
    work = workload(microbatches=64, block_parameters=4 * MEBIBYTE)
    layer = msgspec.structs.replace(work.block, saved_bytes=40 * MEBIBYTE)
    work = msgspec.structs.replace(
        work, embedding=layer, block=layer, head=layer, recompute=recompute
    )
    return snapshot([Peer(memory_bytes=memory_bytes)] * 2, work, link=link)


def planned(asked: Snapshot) -> Plan:
    plan = compute_plan(asked)
    assert isinstance(plan, Plan)
    return plan


def test_memory_that_starves_a_long_pipeline_is_made_by_recomputing() -> None:
    short = 932 * MEBIBYTE
    auto, never = swarm(short, "auto"), swarm(short, "never")
    plan, starved = planned(auto), planned(never)
    assert plan.predicted_step_ns < 0.5 * starved.predicted_step_ns
    stages = plan.pipelines[0].stages
    assert stages[0].in_flight > 4 * starved.pipelines[0].stages[0].in_flight
    assert must_recompute(auto, plan, stages[0].peer_id)
    assert not any(must_recompute(never, starved, s.peer_id) for s in starved.pipelines[0].stages)
    stage, told = stages[0], explain(auto, plan).peers[0]
    assert stage.peer_id == told.peer_id and stage.first_layer == 0
    (block, tenth), count = (3_000_000, 300_000), plan.pipelines[0].microbatch_count
    once_ns = (len(stage.layers) - 1) * block + tenth
    assert told.compute_ns == count * once_ns * 4 // 3, "with a second forward"
    kept = 40 + len(stage.layers) - 1
    used = 80 * len(stage.layers) + stage.in_flight * kept + 40
    assert told.used_bytes == used * MEBIBYTE <= short


def test_with_room_enough_nobody_recomputes_unless_the_run_says_so() -> None:
    roomy = 64 << 30
    auto, never, always = (swarm(roomy, how) for how in ("auto", "never", "always"))
    assert planned(auto) == planned(never)
    assert not must_recompute(auto, planned(auto), "peer-0000")
    everywhere = planned(always)
    assert must_recompute(always, everywhere, "peer-0000")
    assert everywhere.predicted_step_ns > planned(auto).predicted_step_ns


def test_recomputing_can_be_what_makes_a_model_fit() -> None:
    tight = 652 * MEBIBYTE
    assert isinstance(compute_plan(swarm(tight, "never")), NoPlan)
    plan = planned(swarm(tight, "auto"))
    for stage in plan.pipelines[0].stages:
        assert must_recompute(swarm(tight, "auto"), plan, stage.peer_id)
        state = len(stage.layers) * 80 * MEBIBYTE
        held = stage.in_flight * len(stage.layers) * MEBIBYTE + 40 * MEBIBYTE
        assert state + held <= tight


@pytest.mark.parametrize("how", ["auto", "always"])
def test_who_must_wait_gets_no_stage_where_the_others_hold_the_model_by_recomputing(
    how: str,
) -> None:
    """The newcomer got a stage at once in every such run. The check was whether the others hold the
    model without recomputing."""
    two = swarm(652 * MEBIBYTE, how)
    here = [Peer(memory_bytes=652 * MEBIBYTE)] * 3
    three = snapshot(here, two.workload, link=FAR, present=planned(two))
    new, others = name_of(2), {name_of(0), name_of(1)}
    assert new in planned(three).stage_holders(), "it makes the step shorter"
    three = msgspec.structs.replace(three, bars=(Bar(GENESIS, 0, new, 0, 50, "new"),))
    assert set(planned(three).stage_holders()) == others


def test_who_guards_what_is_the_same_in_a_plan_and_in_its_view() -> None:
    """A view counted all that a stage saves, though the stage recomputed. The plan of a stage that
    does not recompute counted only its inputs. Layers that the plan saw guarded were guarded by
    nobody."""
    shot = swarm(0, "auto")
    devices = [
        msgspec.structs.replace(record.device, memory_bytes=mebibytes * MEBIBYTE)
        for record, mebibytes in zip(shot.records, (932, 2160), strict=True)
    ]
    records = tuple(map(_with_device, shot.records, devices))
    shot = msgspec.structs.replace(shot, records=records)
    stages = Stage(name_of(0), 0, 7, 5), Stage(name_of(1), 7, 14, 5)
    plan = Plan((Pipeline(stages, 0, 64),), (), 10**9)
    assert [must_recompute(shot, plan, name_of(n)) for n in (0, 1)] == [True, False]
    problem = problem_in_force(shot, plan)
    planned = Guarding(problem).by((0, 1), (0, 7, 14), (5, 5))
    guarded = guarded_pairs(shot, plan, guards_in(shot, plan))
    assert [(name_of(it.holder), name_of(it.guardian), it.size_bytes) for it in planned] == [
        (it.holder, it.guardian, it.gradient_bytes) for it in guarded
    ]
    # of 96 MiB each: the second has 2160 - 560 - 5 * 280 left, the first 932 - 560 - 40 - 5 * 46
    assert [len(it.layers) for it in guarded] == [2, 1]


def _with_device(record: PeerRecord, device: Device) -> PeerRecord:
    return msgspec.structs.replace(record, device=device)


@pytest.mark.parametrize(("count", "share"), [(1, 0.5), (1, 3.0), (2, 0.5)])
def test_a_refusal_says_what_is_offered_and_what_is_enough(count: int, share: float) -> None:
    """What a peer sets aside to go back through a layer was subtracted from its stated offer. A
    peer that offered less than that was asked for too little."""
    work = swarm(0, "auto").workload
    offered = int(share * work.block.saved_bytes)
    refused = compute_plan(snapshot([Peer(memory_bytes=offered)] * count, work))
    assert isinstance(refused, NoPlan) and refused.missing_bytes > 0
    assert f" {bytes_text(count * offered, rounded_up=True)}, of which " in refused.reason
    more = [Peer(memory_bytes=offered + refused.missing_bytes)]
    more += [Peer(memory_bytes=offered)] * (count - 1)
    assert isinstance(compute_plan(snapshot(more, work)), Plan)


@pytest.mark.parametrize("how", ["auto", "always", "never"])
def test_the_run_spec_says_it(how: str) -> None:
    values = run_spec().model_dump(mode="python") | {"compute": {"recompute": how}}
    assert workload_of(type(run_spec()).model_validate(values)).recompute == how


@pytest.mark.parametrize("seed", [40, 125, 138])
def test_what_a_plan_said_when_it_was_made_does_not_decide_whether_it_stays(seed: int) -> None:
    """Links have changed since. A kept plan says what it said when it was made, and that was
    compared with what a recomputing plan takes now. The swarm left it for a plan two and a half
    times as slow, or kept it beside one three times as fast."""
    chance = random.Random(seed)
    count = chance.choice([2, 3, 4])
    blocks, microbatches = chance.choice([2, 4, 6]), chance.choice([8, 16])
    work = workload(blocks, microbatches, boundary_bytes=1 << chance.choice([10, 18, 20]))
    work = msgspec.structs.replace(work, recompute="auto")
    whole = 24 * MEBIBYTE * work.layer_count
    peers = [
        Peer(chance.randint(1, 9) * 1_000_000, int(whole * chance.uniform(0.4, 1.1)))
        for _ in range(count)
    ]

    def links() -> dict[tuple[int, int], Link]:
        faster = chance.choice([1, 1, 20])
        return {
            (a, b): Link(
                chance.randint(1, 80) * 1_000_000, chance.randint(1, 50) * 1_000_000 * faster
            )
            for a in range(count)
            for b in range(count)
            if a != b
        }

    before = planned(snapshot(peers, work, links()))
    later = snapshot(peers, work, links(), present=before)
    found = []
    for said_ns in (1, before.predicted_step_ns, 1 << 50):
        present = msgspec.structs.replace(before, predicted_step_ns=said_ns)
        plan = planned(msgspec.structs.replace(later, present=present))
        found.append([pipeline.stages for pipeline in plan.pipelines])
    assert found[0] == found[1] == found[2]
