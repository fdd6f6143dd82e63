"""Plans count what stages really take of memory: the sums of gradients beside the state."""

import random

import msgspec
import pytest

from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.planner.recomputation import must_recompute
from p2p_dtfm.core.protocol.plan import NoPlan, Plan, Stage
from p2p_dtfm.core.protocol.records import ACCELERATOR, Device, Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload
from tests.core.planning import MEBIBYTE, Peer, snapshot, workload

LAYERS = 14
ALONE, SHARED = 20 * MEBIBYTE, 24 * MEBIBYTE
"""Bytes of a layer of a Mi of parameters on a processor. Each gradient's sum lies beside it; with
several replicas, so does what has come of the others' parts."""
SAVED = 8 * MEBIBYTE
FAR = Link(round_trip_ns=100_000_000, bytes_per_s=100_000_000)


def planned(made: Snapshot) -> Plan:
    plan = compute_plan(made)
    assert isinstance(plan, Plan), plan.reason
    return plan


def on_cards(made: Snapshot) -> Snapshot:
    """The same peers, with accelerators."""
    records = tuple(
        msgspec.structs.replace(it, device=msgspec.structs.replace(it.device, kind=ACCELERATOR))
        for it in made.records
    )
    return msgspec.structs.replace(made, records=records)


def taken_bytes(work: Workload, plan: Plan, stage: Stage, device: Device, again: bool) -> int:
    """Bytes counted by hand: 16 for each parameter, 20 where the peer is alone, 24 where several
    share it."""
    costs = [work.cost(layer) for layer in stage.layers]
    held = sum(cost.state_bytes for cost in costs)
    if device.kind == "cpu":
        lossy = work.gradient_bytes_per_kibi < 4096
        sums = 1 if len(plan.pipelines) == 1 else 3 if lossy else 2
        held += sums * 4 * sum(cost.parameter_count for cost in costs)
    if not again:
        return held + stage.in_flight * sum(cost.saved_bytes for cost in costs)
    kept = sum(min(cost.saved_bytes, work.boundary_bytes) for cost in costs)
    return held + stage.in_flight * kept + max(cost.saved_bytes for cost in costs)


def drawn(chance: random.Random) -> Snapshot:
    """A swarm in which memory is short more often than not."""
    work = workload(
        chance.randint(1, 14),
        chance.choice([1, 8, 24]),
        boundary_bytes=1 << chance.choice([10, 20]),
        block_parameters=1 << chance.choice([16, 20, 21]),
    )
    work = msgspec.structs.replace(
        work,
        recompute=chance.choice(["never", "auto", "always"]),
        inner_steps=chance.choice([0, 0, 4]),
        gradient_bytes_per_kibi=chance.choice([4096, 4096, 1065]),
    )
    whole = sum(work.cost(n).state_bytes + 3 * SAVED for n in range(work.layer_count))
    peers = [
        Peer(chance.randint(1, 9) * 1_000_000, int(whole * chance.choice([0.2, 0.5, 1.0, 1.5, 9])))
        for _ in range(chance.randint(1, 7))
    ]
    link = chance.choice([FAR, Link(1_000_000, 1_000_000_000), None])
    made = snapshot(peers, work, link=link)
    if chance.random() < 0.3:
        cards = on_cards(made).records
        mixed = (chance.choice(pair) for pair in zip(made.records, cards, strict=True))
        made = msgspec.structs.replace(made, records=tuple(mixed))
    return made


def assert_within_memory(made: Snapshot, plan: Plan) -> None:
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        device = made.record(stage.peer_id).device
        again = must_recompute(made, plan, stage.peer_id)
        taken = taken_bytes(made.workload, plan, stage, device, again)
        assert taken <= device.memory_bytes, (stage, taken, device.memory_bytes)


@pytest.mark.parametrize("seed", range(12))
def test_no_stage_takes_more_than_its_peer_offers(seed: int) -> None:
    """This holds whoever comes and goes, and however often the swarm plans anew."""
    chance = random.Random(seed)
    for _ in range(6):
        made = drawn(chance)
        for planned_view in (True, True, False):
            plan = compute_plan(made)
            if isinstance(plan, NoPlan):
                break
            assert_within_memory(made, plan)
            told = {peer.peer_id: peer.used_bytes for peer in explain(made, plan).peers}
            for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
                assert told[stage.peer_id] <= made.record(stage.peer_id).device.memory_bytes
            records = tuple(it for it in made.records if chance.random() < 0.8) or made.records
            made = msgspec.structs.replace(
                made, records=records, present=plan, planned=planned_view
            )


@pytest.mark.parametrize("count", [1, 2])
def test_one_pipeline_is_found_where_nothing_else_fits(count: int) -> None:
    """The peers offer what a lone pipeline takes, and not a byte more."""
    each = LAYERS // count * (ALONE + SAVED)
    made = snapshot([Peer(memory_bytes=each)] * count)
    plan = planned(made)
    (pipeline,) = plan.pipelines
    assert len(pipeline.stages) == count
    refused = compute_plan(snapshot([Peer(memory_bytes=each - 1)] * count))
    assert isinstance(refused, NoPlan) and refused.missing_bytes == count


def test_two_homes_that_each_hold_the_model_alone_are_not_overfilled_together() -> None:
    """Both peers got a replica, counted as 16 bytes for each parameter. They took 24, and ended
    without memory."""
    room = LAYERS * (ALONE + SAVED)
    made = snapshot([Peer(memory_bytes=room)] * 2, link=FAR)
    plan = planned(made)
    assert len(plan.pipelines) == 1
    assert_within_memory(made, plan)
    roomier = snapshot([Peer(memory_bytes=LAYERS * (SHARED + SAVED))] * 2, link=FAR)
    assert len(planned(roomier).pipelines) == 2


def test_a_pipeline_that_a_plan_gets_beside_another_takes_more() -> None:
    """A peer comes to a plan of one pipeline, and both pipelines are counted as of several."""
    room = LAYERS * (ALONE + SAVED)
    before = planned(snapshot([Peer(memory_bytes=room)]))
    made = snapshot([Peer(memory_bytes=room)] * 2, present=before, link=FAR)
    plan = planned(made)
    assert_within_memory(made, plan)
    assert len(plan.pipelines) == 1


def test_an_accelerators_sums_are_in_its_hosts_memory() -> None:
    state = 16 * MEBIBYTE
    made = on_cards(snapshot([Peer(memory_bytes=LAYERS * (state + SAVED))] * 2, link=FAR))
    assert len(planned(made).pipelines) == 2
    short = on_cards(snapshot([Peer(memory_bytes=LAYERS * (state + SAVED) - 1)]))
    refused = compute_plan(short)
    assert isinstance(refused, NoPlan) and refused.missing_bytes == 1


def test_of_a_card_and_processors_the_one_that_lacks_less_is_named() -> None:
    """The card offers less than the processors do, and takes less."""
    made = snapshot([Peer(memory_bytes=20 * MEBIBYTE), *[Peer(memory_bytes=21 * MEBIBYTE)] * 40])
    records = on_cards(made).records[0], *made.records[1:]
    refused = compute_plan(msgspec.structs.replace(made, records=records))
    assert isinstance(refused, NoPlan)
    assert refused.missing_bytes == 4 * MEBIBYTE
    assert "the embedding needs 24.0 MiB on one peer" in refused.reason


def test_where_memory_is_not_short_plans_are_as_they_were() -> None:
    """A card takes what processors were once taken to take."""
    for count in (1, 2, 5):
        made = snapshot([Peer(n * 1_000_000 + 1_000_000, 1 << 40) for n in range(count)], link=FAR)
        assert planned(made) == planned(on_cards(made))


def test_what_is_owed_lies_there_once_more_while_a_lossy_reduction_goes_on() -> None:
    """Two daemons with 26 million parameters were measured to take 38 bytes of each parameter,
    where 24 and what is owed twice are 32."""
    memory = stage_memory(msgspec.structs.replace(workload(), gradient_bytes_per_kibi=1065))
    block = memory.layers.block.state_bytes
    assert memory.of("cpu", 1).layers.block.state_bytes == block + 4 * MEBIBYTE
    assert memory.of("cpu", 2).layers.block.state_bytes == block + 12 * MEBIBYTE


@pytest.mark.parametrize(("pipelines", "sums"), [(1, 1), (2, 2), (64, 2)])
def test_what_lies_beside_a_stage(pipelines: int, sums: int) -> None:
    """Only what is trained has sums: adapters have next to none beside a frozen model."""
    memory = stage_memory(workload())
    bare = memory.used_bytes(0, LAYERS, 1, 1 << 40)
    used = memory.of("cpu", pipelines).used_bytes(0, LAYERS, 1, 1 << 40)
    assert used - bare == sums * LAYERS * 4 * MEBIBYTE
    for kind in (ACCELERATOR, "emulated", "scenario"):
        assert memory.of(kind, pipelines) is memory
    frozen = msgspec.structs.replace(workload().block, parameter_count=10)
    adapted = stage_memory(msgspec.structs.replace(workload(), block=frozen))
    assert adapted.of("cpu", pipelines).layers.block.state_bytes == 16 * MEBIBYTE + sums * 40
