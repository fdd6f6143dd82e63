"""One line loses tensors again and again, though a step commits each time in between."""

import pytest

from p2p_dtfm.core.liveness.lost_tensors import OFTEN, OFTEN_NS, AfterLoss, LostTensors
from p2p_dtfm.core.membership.accusers import STOPS_LIMIT, STOPS_OFTEN, Accusers
from p2p_dtfm.core.protocol.snapshot import Member, ViewId

SECOND_NS = 1_000_000_000


def view(number: int) -> ViewId:
    return ViewId(2 * number + 1, "ab" * 32)


@pytest.mark.parametrize("colluders", ["m", "mn", "mnopqr"], ids=len)
def test_who_loses_them_has_no_honest_member_taken_for_who_stops_steps(colluders: str) -> None:
    """Colluders hung up on a peer that sent to them, once in each step, and that peer was out each
    minute."""
    seen, lost, honest = Accusers(), LostTensors(), Member("h", 1)
    for number in range(4 * STOPS_OFTEN):
        liar, now_ns = colluders[number % len(colluders)], number * 9 * SECOND_NS // 2
        remedy = lost.remedy(liar, view(number), now_ns)
        if remedy is AfterLoss.SUSPECT:
            break
        assert remedy is AfterLoss.REPEAT
        assert not seen.stops_steps({honest}, now_ns)
        lost.clear()
        seen.commits()
    assert remedy is AfterLoss.SUSPECT and number <= OFTEN + len(colluders)


@pytest.mark.parametrize("apart_s", [1, 20, 3600])
def test_who_stops_a_step_again_and_again_is_in_doubt_however_long_that_takes(apart_s: int) -> None:
    """Only stops of the last minute were counted. A liar that stopped a step each twenty seconds
    held a run up for good, and nobody was to blame."""
    seen, liar = Accusers(), Member("m", 1)
    times_ns = [number * apart_s * SECOND_NS for number in range(STOPS_LIMIT + 1)]
    found = [seen.stops_steps({liar}, now_ns) for now_ns in times_ns]
    assert found == [set()] * STOPS_LIMIT + [{liar}]


@pytest.mark.parametrize(("for_each_step", "is_found"), [(1, False), (2, True), (3, True)])
def test_who_stops_each_long_step_more_than_once_is_in_doubt(
    for_each_step: int, is_found: bool
) -> None:
    """Three stops for each committed step stayed within every limit, where a step takes more than
    fifteen seconds. One stop may be a line that breaks, or a liar that breaks it."""
    seen, member, found = Accusers(), Member("m", 1), set[Member]()
    for number in range(80 * for_each_step):
        found |= seen.stops_steps({member}, number * 20 * SECOND_NS)
        if number % for_each_step == for_each_step - 1:
            seen.commits()
        if found:
            break
    assert bool(found) == is_found and (not found or number <= STOPS_OFTEN)


def test_who_loses_tensors_with_several_in_each_long_step_is_not_taken_for_one_either() -> None:
    """Two colluders hung up on the peer in turn."""
    seen, lost, honest = Accusers(), LostTensors(), Member("h", 1)
    for number in range(4 * STOPS_OFTEN):
        now_ns = number * 20 * SECOND_NS
        remedy = lost.remedy("mn"[number % 2], view(number), now_ns)
        if remedy is AfterLoss.SUSPECT:
            break
        assert not seen.stops_steps({honest}, now_ns)
        if number % 2:
            lost.clear()
            seen.commits()
    assert remedy is AfterLoss.SUSPECT and number <= OFTEN


def test_a_line_that_breaks_now_and_then_costs_nobody_its_place() -> None:
    lost = LostTensors()
    for number in range(100):
        now_ns = number * (OFTEN_NS // OFTEN)
        assert lost.remedy("a", view(number), now_ns) is AfterLoss.REPEAT
        assert lost.remedy("a", view(number), now_ns) is AfterLoss.NOTHING
        lost.clear()


def test_a_machine_whose_lines_all_break_at_once_accuses_nobody_it_has_lost_nothing_with() -> None:
    lost = LostTensors()
    for number in range(OFTEN):
        for peer in "abc":
            assert lost.remedy(peer, view(number), number * SECOND_NS) is AfterLoss.REPEAT
        lost.clear()
    now_ns = OFTEN * SECOND_NS
    assert lost.remedy("d", view(OFTEN), now_ns) is AfterLoss.REPEAT
    assert lost.remedy("a", view(OFTEN), now_ns) is AfterLoss.SUSPECT
