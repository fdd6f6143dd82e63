"""Seeds in which a peer is away for long, and who is kept out of the others' view in them."""

from types import SimpleNamespace
from typing import Any

from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import ABSENCES
from p2p_dtfm.testbed.virtual.seeds.watching.kept_out import OUTSIDE_S, KeptOut


def test_from_950000_on_a_founder_is_left_or_a_life_is_ahead() -> None:
    schedules = [draw(seed) for seed in range(ABSENCES, ABSENCES + 40)]
    assert all(it.is_slow and it.is_quick and it.waits_for_a_step for it in schedules)
    for ahead, left in zip(schedules[::2], schedules[1::2], strict=True):
        assert sum(fault.kind == "life ahead" for fault in ahead.faults) == 1
        assert not any(fault.kind == "kill" for fault in ahead.faults), "its witnesses stay"
        kinds = [fault.kind for fault in left.faults]
        assert kinds.count("cut") == 1 and kinds.count("kill") == 4
        (cut,) = (fault for fault in left.faults if fault.kind == "cut")
        founder, alone = cut.whom
        assert founder == left.begun[0]
        dead = [fault.whom[0] for fault in left.faults if fault.kind == "kill"]
        assert dead.count(founder) == dead.count(alone) == 1 and len(set(dead)) == 3


def peers(**are_in_a_view: bool) -> Any:
    return [
        SimpleNamespace(name=name, is_running=True, is_in_a_view=is_in, is_let_in=False)
        for name, is_in in are_in_a_view.items()
    ]


def test_who_is_out_for_too_long_while_others_are_in_a_view_is_seen() -> None:
    here = peers(a=True, b=False, c=True)
    kept_out = KeptOut(lambda: here)
    assert not kept_out.look(10.0) and not kept_out.look(10.0 + OUTSIDE_S)
    assert kept_out.look(10.1 + OUTSIDE_S).startswith("b is in no view")
    kept_out.disturb()
    assert not kept_out.look(10.2 + OUTSIDE_S), "it begins anew"
    here[1].is_in_a_view = True
    assert not kept_out.look(20.0 + OUTSIDE_S)
    here[1].is_in_a_view = False
    assert not kept_out.look(11.0 + 2 * OUTSIDE_S), "it was let in meanwhile"


def test_where_nobody_is_in_a_view_and_of_who_does_not_run_nothing_is_asked() -> None:
    here = peers(a=False, b=False)
    kept_out = KeptOut(lambda: here)
    for at_s in (0.0, 2 * OUTSIDE_S):
        assert not kept_out.look(at_s)
    here[0].is_in_a_view, here[1].is_running = True, False
    for at_s in (3 * OUTSIDE_S, 5 * OUTSIDE_S):
        assert not kept_out.look(at_s)
