"""What one member may state of itself, and what its statement must not do to the others."""

import msgspec
import pytest

from p2p_dtfm.core.audit.roles import NEW, alone
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, problem_of
from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.messages.agreement_messages import PresentView
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.measured_plans import MeasuredPlan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link
from p2p_dtfm.core.protocol.snapshot import GENESIS, Bar, Snapshot
from p2p_dtfm.core.protocol.workload import Confined, Workload, workload_of
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot, workload
from tests.core.test_unlike_layers import listed, sizes_of

AUTO = msgspec.structs.replace(workload(blocks=4, microbatches=4), recompute="auto")
HALF = Peer(memory_bytes=4 * (16 + 8) * MEBIBYTE)
"""Memory for four of the six layers."""


def stating(made: Snapshot, number: int, device: Device) -> Snapshot:
    """A snapshot in which one of the peers states something else of its device."""
    records = list(made.records)
    records[number] = msgspec.structs.replace(records[number], device=device)
    return msgspec.structs.replace(made, records=tuple(records))


def planned(made: Snapshot) -> Plan:
    plan = compute_plan(made)
    assert isinstance(plan, Plan), plan.reason
    return plan


@pytest.mark.parametrize(("forward_ns", "backward_ns"), [(0, 0), (1, 1), (1 << 40, 1), (1, 2)])
def test_a_backward_that_takes_no_time_leaves_nothing_to_divide_by(
    forward_ns: int, backward_ns: int
) -> None:
    """The time that a stage with split backwards leaves for later came to zero nanoseconds. Every
    peer that planned such a swarm ended with `ZeroDivisionError`."""
    made = snapshot([HALF] * 3, AUTO)
    timing = LayerTiming(forward_ns, backward_ns)
    for number in range(3):
        device = Device("cpu", "test", HALF.memory_bytes, timing, timing, timing)
        plan = planned(stating(made, number, device))
        assert {*plan.stage_holders(), *plan.spares} == {name_of(n) for n in range(3)}


@pytest.mark.parametrize("link", [Link(1 << 59, 1), Link(0, 1)])
def test_a_plan_whatever_it_takes_is_one_that_members_may_tell_of(link: Link) -> None:
    """The model had no room without one member, and by that member's word steps took very long.
    Whoever told of the plan was refused, so no view came after that one."""
    large: Workload = workload(blocks=4, microbatches=64, boundary_bytes=1 << 28)
    made = snapshot([HALF, HALF], large, link=link)
    plan = planned(made)
    assert len(plan.pipelines[0].stages) == 2
    require_bounded_part(PresentView(made.view_id, made.members, plan), "a")


def test_so_are_those_of_who_says_it_takes_years_for_a_layer() -> None:
    slow = LayerTiming((1 << 60) - 1, (1 << 60) - 1)
    device = Device("cpu", "test", HALF.memory_bytes, slow, slow, slow)
    made = stating(snapshot([HALF, HALF], workload(blocks=4)), 1, device)
    require_bounded_part(PresentView(made.view_id, made.members, planned(made)), "a")


def test_a_member_with_hardly_any_memory_does_not_take_the_plan_from_those_that_have_one() -> None:
    """Of more than six peers not every order was tried. A seventh peer without any room was enough,
    and the others did not fit any more."""
    unit = 1_000_000
    work = workload_of(listed([sizes_of((16, 8), each * unit) for each in (3, 4, 3)]))
    layers = stage_memory(work).alone.layers
    needed = [layers.of(n).needed_bytes for n in range(3)]
    able = [Peer(memory_bytes=needed[0])] * 2 + [Peer(memory_bytes=needed[1])]
    before = planned(snapshot(able, work))
    for others in ([Peer(memory_bytes=1)] * 4, [Peer(memory_bytes=needed[0] - 1)] * 9):
        plan = planned(snapshot([*able, *others], work))
        assert set(plan.stage_holders()) == set(before.stage_holders())


def test_who_tells_of_steps_in_two_stages_gets_none_where_each_holds_the_whole_model() -> None:
    """The two members that said so had all layers between them, in a run where no such plan can be
    audited."""
    peers = [Peer(memory_bytes=1 << 40)] * 4
    made = snapshot(peers, msgspec.structs.replace(AUTO, confined=Confined(one_stage=True)))
    before = planned(made)
    shape = (((name_of(2), name_of(3)), (0, 3, 6)),)
    records = tuple(
        msgspec.structs.replace(it, measured=(MeasuredPlan(shape, 1),)) if number > 1 else it
        for number, it in enumerate(made.records)
    )
    told = msgspec.structs.replace(made, records=records, present=before, step=5)
    assert {len(pipeline.stages) for pipeline in planned(told).pipelines} == {1}


def test_of_two_new_keys_the_second_does_not_get_what_is_kept_from_the_first() -> None:
    """A plan that left layers to an unknown key was made again without that key alone."""
    made = snapshot([HALF] * 3 + [Peer(1_000)] * 2, workload(blocks=4, microbatches=16))
    assert planned(made).stage_holders() == (name_of(3),)
    bars = tuple(Bar(GENESIS, 0, name_of(n), 0, int(n > 2), NEW) for n in range(5))
    watching = msgspec.structs.replace(made, bars=bars, step=10)
    plan = planned(watching)
    assert not alone(watching, plan)
    assert {name_of(n) for n in range(3)} & set(plan.stage_holders())


def test_no_rate_is_beyond_what_the_compiled_weights_take() -> None:
    """One member stated limits of 2^60 bytes a second, and all weights came from the slow twin in
    Python. Plans of 48 members then took twice as long."""
    absurd = (1 << 60) - 1
    limits = Peer(uplink_bytes_per_s=absurd, downlink_bytes_per_s=absurd)
    ways = {(0, 1): Link(1, absurd), (1, 0): Link(1, absurd)}
    links = problem_of(snapshot([limits, Peer(), Peer()], links=ways)).links
    rates = [*links.uplink_bytes_per_s, *links.downlink_bytes_per_s]
    for row in (*links.pair_bytes_per_s, *links.bytes_per_s):
        rates += row
    assert max(rates) == UNLIMITED_BYTES_PER_S
