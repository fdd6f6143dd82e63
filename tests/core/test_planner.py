"""What every plan must satisfy, whatever the peers."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.bound import step_lower_bound_ns
from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan, agreed, shape_of
from p2p_dtfm.core.protocol.plan import NoPlan, Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.core.protocol.records import Intent, Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Confined, Workload
from p2p_dtfm.core.recovery.view import View
from tests.core.planning import LAN, MEBIBYTE, Peer, name_of, snapshot, workload

ROOT = Path(__file__).parents[2]
FAST = Peer(block_ns=1_000_000)


def plan(made: Snapshot) -> Plan:
    found = compute_plan(made)
    assert isinstance(found, Plan), found.reason
    check_plan(
        found,
        made.workload.layer_count,
        made.workload.microbatch_count,
        {record.peer_id for record in made.records},
    )
    return found


def test_prng_is_splitmix64() -> None:
    """The published first outputs for seed 1234567."""
    prng = Prng(1234567)
    assert [prng.next_u64() for _ in range(3)] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_one_peer_holds_everything() -> None:
    found = plan(snapshot([Peer()]))
    (pipeline,) = found.pipelines
    (stage,) = pipeline.stages
    assert (stage.first_layer, stage.end_layer) == (0, 14)
    assert found.predicted_step_ns > 0


def test_four_equal_peers_on_loopback_share_the_work() -> None:
    alone = plan(snapshot([Peer()])).predicted_step_ns
    together = plan(snapshot([Peer()] * 4))
    assert not together.spares
    assert together.predicted_step_ns < alone // 3


def test_those_who_leave_or_only_stand_by_get_no_stage() -> None:
    peers = [Peer(), Peer(intent=Intent.LEAVING), Peer(), Peer(intent=Intent.SPARE)]
    found = plan(snapshot(peers))
    assert found.spares == (name_of(1), name_of(3))


def test_too_few_members() -> None:
    peers = [Peer(), Peer(), Peer(intent=Intent.LEAVING)]
    found = compute_plan(snapshot(peers, workload(min_members=3)))
    assert isinstance(found, NoPlan)
    assert "at least 3" in found.reason and "2 of 3" in found.reason


def test_nobody_can_train() -> None:
    assert isinstance(compute_plan(snapshot([Peer(intent=Intent.SPARE)])), NoPlan)


def test_memory_that_is_short_is_named() -> None:
    found = compute_plan(snapshot([Peer(memory_bytes=100 * MEBIBYTE)] * 2))
    assert isinstance(found, NoPlan)
    assert found.missing_bytes == 14 * 28 * MEBIBYTE - 200 * MEBIBYTE
    assert "392 MiB" in found.reason and "2 peers offer 200 MiB" in found.reason


def test_one_layer_larger_than_any_peer_is_named() -> None:
    found = compute_plan(snapshot([Peer(memory_bytes=20 * MEBIBYTE)] * 64))
    assert isinstance(found, NoPlan)
    assert found.missing_bytes == 8 * MEBIBYTE
    assert "embedding" in found.reason


@pytest.mark.parametrize("named", [(), tuple(range(5))])
def test_one_that_alone_has_room_for_an_end_is_told_what_a_second_one_lacks(
    named: tuple[int, ...],
) -> None:
    """The answer said that layers do not divide, and asked for memory for all of them. The 21 peers
    offered ten times what the run takes."""
    whole = workload()
    larger = msgspec.structs.replace(whole.embedding, state_bytes=1013 * MEBIBYTE)
    head = msgspec.structs.replace(larger, state_bytes=1016 * MEBIBYTE)
    ends = Confined(ends=tuple(map(name_of, named)))
    work = msgspec.structs.replace(whole, embedding=larger, head=head, confined=ends)
    peers = [Peer(memory_bytes=1030 * MEBIBYTE), *[Peer(memory_bytes=1000 * MEBIBYTE)] * 20]
    found = compute_plan(snapshot(peers, work))
    assert isinstance(found, NoPlan)
    assert found.missing_bytes == 25 * MEBIBYTE
    others = (len(named) or 21) - 1
    assert f"the largest of {others} others" in found.reason and "embedding" in found.reason
    peers[1] = Peer(memory_bytes=1000 * MEBIBYTE + found.missing_bytes)
    assert isinstance(compute_plan(snapshot(peers, work)), Plan)


def test_layers_that_do_not_divide_are_named() -> None:
    """Each of three peers holds four of fourteen layers, though the bytes would suffice."""
    found = compute_plan(snapshot([Peer(memory_bytes=135 * MEBIBYTE)] * 3))
    assert isinstance(found, NoPlan)
    assert found.missing_bytes == 2 * 28 * MEBIBYTE


def test_memory_decides_the_shape() -> None:
    """Each peer holds half of the model with two microbatches in flight: two pipelines of two
    stages."""
    light = workload(block_parameters=1 << 16)
    found = plan(snapshot([Peer(memory_bytes=7 * 35 * MEBIBYTE // 2)] * 4, light))
    assert [len(pipeline.stages) for pipeline in found.pipelines] == [2, 2]


def test_pipelines_of_unlike_length() -> None:
    """A single block cannot be cut, and only one peer can hold all: pipelines of one and two."""
    whole, half = Peer(memory_bytes=1 << 40), Peer(memory_bytes=30 * MEBIBYTE)
    two = workload(blocks=1, microbatches=256, block_parameters=1 << 18, boundary_bytes=1 << 10)
    found = plan(snapshot([whole, half, half], two))
    assert sorted(len(pipeline.stages) for pipeline in found.pipelines) == [1, 2]
    assert not found.spares


def test_a_faster_peer_gets_more_layers() -> None:
    """Neither can hold the model alone."""
    half = 10 * 40 * MEBIBYTE
    found = plan(snapshot([Peer(1_000_000, half), Peer(3_000_000, half)]))
    (pipeline,) = found.pipelines
    by_peer = {stage.peer_id: len(stage.layers) for stage in pipeline.stages}
    assert by_peer[name_of(0)] >= 2 * by_peer[name_of(1)]


def test_a_faster_pipeline_gets_more_microbatches() -> None:
    found = plan(snapshot([Peer(1_000_000), Peer(3_000_000)], workload(block_parameters=1 << 10)))
    counts = {p.stages[0].peer_id: p.microbatch_count for p in found.pipelines}
    assert counts == {name_of(0): 48, name_of(1): 16}


def test_unmeasured_links_still_give_a_plan() -> None:
    assert plan(snapshot([Peer()] * 3, link=None)).predicted_step_ns > 0


def test_more_peers_than_layers_or_microbatches() -> None:
    plan(snapshot([Peer()] * 9, workload(blocks=1, microbatches=1)))


def test_latency_is_bridged_by_microbatches_in_flight() -> None:
    """A forced pipeline over a 100 ms round trip keeps more in flight than its depth."""
    half = Peer(memory_bytes=7 * 512 * MEBIBYTE + 7 * 8 * 40 * MEBIBYTE)
    large = workload(block_parameters=32 * MEBIBYTE)
    found = plan(snapshot([half, half], large, link=Link(100_000_000, 1_000_000_000)))
    (pipeline,) = found.pipelines
    assert pipeline.stages[0].in_flight > 4
    assert pipeline.stages[-1].in_flight == 1


def test_fixed_plans() -> None:
    made = snapshot([Peer()] * 5)
    for shape in ((1,), (2,), (2, 2), (2, 1), (5,)):
        found = fixed_plan(made, shape)
        assert tuple(len(pipeline.stages) for pipeline in found.pipelines) == shape
    assert [p.microbatch_count for p in fixed_plan(made, (2, 1)).pipelines] == [42, 22]


links = st.builds(
    Link, st.integers(0, 400_000_000), st.sampled_from([0, 10_000, 2_500_000, 125_000_000, 10**9])
)
peers = st.builds(
    Peer,
    block_ns=st.integers(0, 50_000_000),
    memory_bytes=st.integers(16 * MEBIBYTE, 512 * MEBIBYTE),
    uplink_bytes_per_s=st.sampled_from([0, 1_000, 2_500_000, 125_000_000]),
    downlink_bytes_per_s=st.sampled_from([0, 2_500_000, 125_000_000]),
    intent=st.sampled_from([Intent.TRAIN, Intent.TRAIN, Intent.TRAIN, Intent.SPARE]),
)
works: st.SearchStrategy[Workload] = st.builds(
    workload, st.integers(1, 14), st.integers(1, 24), st.integers(1, 1 << 22)
)


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    drawn = draw(st.lists(peers, min_size=1, max_size=7))
    pairs = [(a, b) for a in range(len(drawn)) for b in range(len(drawn))]
    return snapshot(
        drawn,
        draw(works),
        draw(st.dictionaries(st.sampled_from(pairs), links)),
        draw(st.none() | links),
    )


@settings(max_examples=40, deadline=None)
@given(snapshots(), st.randoms(use_true_random=False))
def test_any_snapshot(made: Snapshot, order: object) -> None:
    """Within memory, complete, and equal bytes for any order of the records."""
    found = compute_plan(made)
    shuffled = list(made.records)
    order.shuffle(shuffled)  # type: ignore[attr-defined]
    again = compute_plan(msgspec.structs.replace(made, records=tuple(shuffled)))
    if isinstance(found, NoPlan):
        assert found == again
        assert found.reason
        return
    assert isinstance(again, Plan)
    plan(made)
    assert_within_memory(found, made)
    assert found.predicted_step_ns >= step_lower_bound_ns(problem_of(made))


def assert_within_memory(found: Plan, made: Snapshot) -> None:
    sums_bytes = 8 if len(found.pipelines) > 1 else 4
    for pipeline in found.pipelines:
        for stage in pipeline.stages:
            costs = [made.workload.cost(layer) for layer in stage.layers]
            used = sum(cost.state_bytes + stage.in_flight * cost.saved_bytes for cost in costs)
            used += sums_bytes * sum(cost.parameter_count for cost in costs)
            assert used <= made.record(stage.peer_id).device.memory_bytes
            assert made.record(stage.peer_id).intent is Intent.TRAIN


DIGEST_PROGRAM = """
from tests.core.planning import *
peers = [Peer(1_000_000 * (1 + n % 3), (100 + 70 * n) << 20) for n in range(9)]
links = {(a, b): Link(1000_000 * (a + b), 10_000_000 * (1 + a)) for a in range(9) for b in range(9)}
from p2p_dtfm.core.planner.planner import compute_plan
print(compute_plan(snapshot(peers, links=links)).digest())
"""


def test_equal_digests_under_any_hash_seed() -> None:
    digests = {
        subprocess.run(
            [sys.executable, "-c", DIGEST_PROGRAM],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(digests) == 1


class TestUnmeasured:
    """A newcomer has the faster device, but nobody has measured its link."""

    def grown(self, link: Link | None, newcomer: Peer = FAST) -> Snapshot:
        founder = Peer(block_ns=30_000_000)
        alone = plan(snapshot([founder]))
        links = {} if link is None else {(1, 0): link}
        return snapshot([founder, newcomer], links=links, link=None, present=alone)

    def test_it_is_a_spare_until_its_link_is_measured(self) -> None:
        assert plan(self.grown(None)).spares == (name_of(1),)
        assert plan(self.grown(LAN)).stage_of(name_of(1)) is not None

    def test_nobody_waits_for_it_as_a_guardian(self) -> None:
        slow = Peer(block_ns=10**11)
        for link, guardians in ((None, set()), (LAN, {name_of(1)})):
            found = self.grown(link, slow)
            assert set(View(found, plan(found)).guards.values()) == guardians

    def test_where_the_founder_is_gone_it_may_hold_everything(self) -> None:
        found = self.grown(None)
        alone = msgspec.structs.replace(found, records=found.records[1:])
        assert plan(alone).stage_of(name_of(1)) is not None

    def test_where_memory_is_short_it_helps_all_the_same(self) -> None:
        founder = Peer(memory_bytes=300 * MEBIBYTE)
        present = Plan((Pipeline((Stage(name_of(0), 0, 14, 1),), 0, 64),), (), 1)
        found = snapshot([founder, Peer()], link=None, present=present)
        assert plan(found).stage_of(name_of(1)) is not None


class TestSlowLine:
    """A newcomer has the faster device, but a step's gradients travel to it for most of a step."""

    def grown(self, bytes_per_s: int) -> Snapshot:
        founder = Peer(block_ns=30_000_000)
        line = Link(round_trip_ns=80_000_000, bytes_per_s=bytes_per_s)
        return snapshot([founder, FAST], link=line, present=plan(snapshot([founder])))

    def test_it_gets_no_states_that_would_never_arrive(self) -> None:
        assert plan(self.grown(3_000_000)).spares == (name_of(1),)
        assert plan(self.grown(30_000_000)).stage_of(name_of(1)) is not None


class TestMeasured:
    """What steps took under a plan counts more than what was predicted."""

    def measured(self, **step_ms: int) -> Snapshot:
        """Two alike peers on a good link, in the plan that suits them best."""
        peers = [Peer(block_ns=30_000_000)] * 2
        together = plan(snapshot(peers))
        alone = plan(snapshot(peers[:1]))
        found = snapshot(peers, present=together)
        shapes = {"together": shape_of(together), "alone": shape_of(alone)}
        told = tuple(MeasuredPlan(shapes[name], ms * 10**6) for name, ms in step_ms.items())
        records = tuple(msgspec.structs.replace(r, measured=told) for r in found.records)
        return msgspec.structs.replace(found, records=records)

    def test_a_gain_that_does_not_come_is_taken_back(self) -> None:
        assert not plan(self.measured()).spares
        taken_back = plan(self.measured(together=60_000, alone=25_000))
        assert len(taken_back.spares) == 1

    def test_a_gain_that_comes_is_kept(self) -> None:
        for together in (20_000, 24_000):
            assert not plan(self.measured(together=together, alone=25_000)).spares

    def test_a_swarm_is_never_slower_than_its_best_member(self) -> None:
        """The best member alone was never tried as a plan, but it has no links that might be slower
        than thought."""
        assert len(plan(self.measured(together=60_000)).spares) == 1

    def test_plans_that_cannot_be_are_not_tried(self) -> None:
        names, found = [name_of(n) for n in range(2)], self.measured(together=60_000)
        as_before = plan(found)
        for shape in (
            (((names[0],), (0, 15)),),
            (((names[0],), (0, 13)),),
            (((names[0],), (0, 14)), ((names[1],), (0, 13))),
            ((("nobody",), (0, 14)),),
            (((names[1],), (0, 14)), ((names[0],), (0, 14))),
        ):
            told = (*found.records[0].measured, MeasuredPlan(shape, 1))
            records = (msgspec.structs.replace(found.records[0], measured=told), found.records[1])
            assert plan(msgspec.structs.replace(found, records=records)) == as_before

    def test_one_liar_among_three_is_not_heard(self) -> None:
        lie = (MeasuredPlan((((name_of(0),), (0, 14)),), 1),)
        truth = (MeasuredPlan((((name_of(0),), (0, 14)),), 100),)
        assert agreed({name_of(1): lie, name_of(0): truth, name_of(2): truth}) == {
            truth[0].shape: 100
        }
