"""What one member may state of itself, and what must not come of it for the others."""

import msgspec
import pytest

from p2p_dtfm.core.messages.agreement_messages import PresentView
from p2p_dtfm.core.messages.message_bounds import require_bounded_part
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Device, LayerTiming, Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload
from tests.core.planning import MEBIBYTE, Peer, name_of, snapshot, workload

AUTO = msgspec.structs.replace(workload(blocks=4, microbatches=4), recompute="auto")
HALF = Peer(memory_bytes=4 * (16 + 8) * MEBIBYTE)
"""Has room for four of the six layers."""


def stating(made: Snapshot, number: int, device: Device) -> Snapshot:
    """One of them says something else of its device."""
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
    """What a stage that splits its backwards leaves for later came to nought nanoseconds, and all
    that planned such a swarm ended with `ZeroDivisionError`."""
    made = snapshot([HALF] * 3, AUTO)
    timing = LayerTiming(forward_ns, backward_ns)
    for number in range(3):
        device = Device("cpu", "test", HALF.memory_bytes, timing, timing, timing)
        plan = planned(stating(made, number, device))
        assert {*plan.stage_holders(), *plan.spares} == {name_of(n) for n in range(3)}


@pytest.mark.parametrize("link", [Link(1 << 59, 1), Link(0, 1)])
def test_a_plan_whatever_it_takes_is_one_that_members_may_tell_of(link: Link) -> None:
    """A member without which the model has no room made steps so long, by its word, that whoever
    told of the plan was refused: no view came after that one."""
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
