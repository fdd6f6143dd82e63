"""In a run with audits no member's work is left to a colluder alone, where members have the
memory."""

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import with_roles
from p2p_dtfm.core.planner.planner import compute_plan, fixed_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot
from p2p_dtfm.core.protocol.workload import Confined
from tests.core.audit.parts import few_others
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot, workload

FAST, USUAL = Peer(1_500_000), Peer(30_000_000)
NO_ROOM = Peer(30_000_000, memory_bytes=150 * MEBIBYTE)
HALF_ROOM = Peer(30_000_000, memory_bytes=240 * MEBIBYTE)


def audited(peers: list[Peer], microbatches: int = 64, **changes: object) -> Snapshot:
    made = snapshot(peers, workload(microbatches=microbatches))
    bars = with_roles((), (), [record.peer_id for record in made.records], 0, 50)
    return msgspec.structs.replace(made, bars=bars, **changes)


def plan(found: Snapshot) -> Plan:
    made = compute_plan(found)
    assert isinstance(made, Plan)
    return made


def test_two_that_say_they_are_fast_are_not_left_to_each_other() -> None:
    peers = [FAST, FAST, *[USUAL] * 5]
    plain = plan(snapshot(peers, workload(microbatches=4)))
    assert few_others(plain), "without audits speed is all that counts"
    made = plan(audited(peers, microbatches=4))
    assert not few_others(made) and len(made.stage_holders()) == 4
    many = plan(audited(peers, microbatches=64))
    assert set(many.stage_holders()) == {name_of(n) for n in range(7)}
    assert sum(pipeline.microbatch_count for pipeline in many.pipelines) == 64
    assert many.predicted_step_ns < 2 * plain.predicted_step_ns * 16


@pytest.mark.parametrize("peers", [[FAST, USUAL], [FAST, USUAL, NO_ROOM, NO_ROOM]])
def test_two_with_room_for_the_model_are_too_few_to_judge(peers: list[Peer]) -> None:
    shapes = [
        [pipeline.stages for pipeline in plan(found).pipelines]
        for found in (audited(peers), snapshot(peers))
    ]
    assert shapes[0] == shapes[1]


def test_who_is_much_slower_than_the_middle_one_is_left_out() -> None:
    snail = Peer(300_000_000)
    made = plan(audited([FAST, FAST, USUAL, USUAL, USUAL, snail]))
    assert name_of(5) not in made.stage_holders() and len(made.stage_holders()) == 5


def test_while_all_stand_still_nobody_waits_for_states() -> None:
    peers = [FAST, FAST, *[USUAL] * 4]
    before = audited(peers)
    present = fixed_plan(before, (1, 1, 1, 1))
    held = tuple(HeldLayer(name_of(n), layer, 5) for n in range(4) for layer in range(14))
    failed = {"planned": False, "step": 5, "present": present, "held": held}
    without_one = msgspec.structs.replace(before, records=before.records[:3] + before.records[4:])
    made = plan(msgspec.structs.replace(without_one, **failed))
    assert not few_others(made)
    gone = msgspec.structs.replace(before, records=before.records[:2] + before.records[4:])
    fewer = plan(msgspec.structs.replace(gone, **failed))
    assert fewer.provisional or not few_others(fewer), "or a planned view follows"


def test_a_plan_that_stands_stays_to_the_byte() -> None:
    found = audited([FAST, FAST, *[USUAL] * 5])
    made = plan(found)
    again = plan(msgspec.structs.replace(found, present=made, number=2))
    assert again == msgspec.structs.replace(made, spares=again.spares)


@pytest.mark.parametrize("count", range(6, 11))
@pytest.mark.parametrize("microbatches", [8, 64])
def test_pipelines_are_cut_alike_where_nobody_has_the_whole_model(
    count: int, microbatches: int
) -> None:
    """The fastest plan for an odd number had two pipelines of two stages and one of three. Nobody
    could compute the work of its middle stage again."""
    made = plan(audited([HALF_ROOM] * count, microbatches))
    assert not few_others(made)
    assert sum(pipeline.microbatch_count for pipeline in made.pipelines) == microbatches
    cuts = {tuple(stage.first_layer for stage in it.stages) for it in made.pipelines}
    assert len(cuts) == 1


def test_who_says_that_it_is_fast_has_auditors_in_pipelines_as_well() -> None:
    quick = Peer(1_500_000, memory_bytes=240 * MEBIBYTE)
    made = plan(audited([quick, quick, *[HALF_ROOM] * 4], microbatches=8))
    assert not few_others(made) and len(made.stage_holders()) == 6


def test_pipelines_that_are_cut_alike_stay_to_the_byte() -> None:
    found = audited([HALF_ROOM] * 7)
    made = plan(found)
    for number in (2, 3, 4):
        again = plan(
            msgspec.structs.replace(found, present=made, number=number, knowledge=str(number))
        )
        assert again == msgspec.structs.replace(made, spares=again.spares)


def test_a_run_that_allows_no_stages_gets_none() -> None:
    whole = Peer(30_000_000)
    found = audited([whole, whole, *[HALF_ROOM] * 4])
    one_stage = msgspec.structs.replace(found.workload, confined=Confined(one_stage=True))
    made = plan(msgspec.structs.replace(found, workload=one_stage))
    assert all(len(pipeline.stages) == 1 for pipeline in made.pipelines)


def test_of_five_with_half_a_model_each_three_pipelines_cannot_be_made() -> None:
    found = (audited([HALF_ROOM] * 5), snapshot([HALF_ROOM] * 5, workload()))
    shapes = [
        sorted(tuple(stage.first_layer for stage in it.stages) for it in plan(each).pipelines)
        for each in found
    ]
    assert shapes[0] == shapes[1]


def test_a_failure_that_leaves_pairs_enough_leaves_auditors() -> None:
    seven = audited([HALF_ROOM] * 7)
    present = plan(seven)
    held = tuple(
        HeldLayer(peer_id, layer, 5)
        for peer_id in present.stage_holders()
        for layer in present.layers_of(peer_id)
    )
    gone = present.pipelines[0].stages[0].peer_id
    left = tuple(record for record in seven.records if record.peer_id != gone)
    six = msgspec.structs.replace(seven, records=left, step=5, present=present, held=held)
    made = plan(msgspec.structs.replace(six, planned=False))
    assert made.provisional or not few_others(made), "or a planned view follows"
    better = plan(msgspec.structs.replace(six, present=made))
    assert len(better.pipelines) == 3 and not few_others(better)
