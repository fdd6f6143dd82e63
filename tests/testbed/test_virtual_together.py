"""Seeds in which a swarm is divided in the middle of a long run, and which sides stay apart in
them."""

from types import SimpleNamespace
from typing import Any

from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import PARTINGS
from p2p_dtfm.testbed.virtual.seeds.watching.together import APART_S, NOBODY_S, Together

ONE, OTHER = ViewId(3, "one"), ViewId(3, "other")
"""Two views of one number: halves of a swarm may share a number."""


def test_from_980000_on_a_swarm_is_divided_and_most_of_its_run_is_left() -> None:
    schedules = [draw(seed) for seed in range(PARTINGS, PARTINGS + 60)]
    assert all(it.is_slow and it.is_long and it.waits_for_a_step for it in schedules)
    assert {len(it.begun) for it in schedules} == {3, 4, 5, 6}
    for it in schedules:
        sides = [fault.whom for fault in it.faults if fault.kind == "partition"]
        assert 1 <= len(sides) <= 2 and all(0 < len(side) < len(it.begun) for side in sides)
        assert max(fault.at_s + fault.lasts_s for fault in it.faults) < APART_S


def peers(**views: ViewId | None) -> Any:
    return [
        SimpleNamespace(name=name, is_running=True, is_away=False, view_id=view)
        for name, view in views.items()
    ]


def test_sides_that_stay_apart_are_seen() -> None:
    here = peers(a=ONE, b=ONE, c=OTHER)
    together = Together(lambda: here)
    assert not together.look(10.0) and not together.look(10.0 + APART_S)
    problem = together.look(10.1 + APART_S)
    assert "a in 3:one, b in 3:one, c in 3:other" in problem
    together.disturb()
    assert not together.look(10.2 + APART_S), "it begins anew"
    here[2].view_id = ONE
    assert not together.look(11.0 + APART_S)
    here[2].view_id = None
    assert not together.look(12.0 + APART_S) and not together.look(12.0 + 2 * APART_S)
    assert "c in none" in together.look(12.1 + 2 * APART_S)


def test_who_founds_anew_has_more_time_and_no_more_than_is_promised() -> None:
    here = peers(a=None, b=None)
    together = Together(lambda: here)
    assert not together.look(1.0) and not together.look(NOBODY_S)
    assert "a in none, b in none" in together.look(1.1 + NOBODY_S)
    here[0].view_id = ONE
    together.disturb()
    assert not together.look(300.0) and not together.look(300.0 + APART_S)
    here[0].view_id = None
    assert not together.look(301.0 + APART_S), "nobody is in a view any more"
    here[1].view_id = ONE
    assert not together.look(302.0 + APART_S) and not together.look(302.0 + 2 * APART_S)
    assert together.look(302.1 + 2 * APART_S)


def test_of_who_does_not_run_or_is_away_nothing_is_asked() -> None:
    here = peers(a=ONE, b=OTHER, c=None)
    here[1].is_running, here[2].is_away = False, True
    together = Together(lambda: here)
    assert not any(together.look(at_s) for at_s in (1.0, 2 * APART_S, 4 * APART_S))
