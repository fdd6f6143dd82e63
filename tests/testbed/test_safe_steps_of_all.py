"""A step that any member has told to be safe is never computed again, after at most one crash."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.testbed.virtual.seeds.judge import Broken, require_safe_steps_stay


def view(number: int, at_s: float, members: str = "ab", snapshot: str = "") -> dict[str, Any]:
    told = {"view": number, "snapshot": snapshot or f"s{number}", "members": list(members)}
    return {"event": "view", "at_s": at_s, **told}


def step(number: int, at_s: float, in_view: int, safe: int | None = None) -> dict[str, Any]:
    return {"event": "step", "step": number, "at_s": at_s, "view": in_view, "safe_step": safe}


def peer(name: str, *events: dict[str, Any]) -> Any:
    return SimpleNamespace(name=name, events=lambda: list(events))


DEAD = peer("a", view(1, 0.0), *(step(n, n + 0.5, 1, n + 1) for n in range(6)))
"""The dead peer's word of step 5 is the last one that it said."""
CRASH_S = 6.0


def test_what_the_dead_has_told_holds_for_those_that_go_on() -> None:
    """No other member had heard of step 5."""
    others = peer("b", view(1, 0.0), step(4, 4.6, 1, 4), view(2, 7.0, "b"), step(5, 8.0, 2))
    with pytest.raises(Broken, match=r"b: step 5 again at 8.00 s, with 6 safe ones at 5.50 s .*a"):
        require_safe_steps_stay([DEAD, others], [CRASH_S])
    require_safe_steps_stay([others], [CRASH_S])
    require_safe_steps_stay([DEAD, others], [CRASH_S, 6.5])
    require_safe_steps_stay([DEAD, others], [4.0, CRASH_S])


def test_who_hears_late_of_a_step_has_not_made_it_again() -> None:
    late = peer("b", view(1, 0.0), step(5, 5.9, 1), view(2, 7.0, "b"), step(6, 8.0, 2))
    require_safe_steps_stay([DEAD, late], [CRASH_S])
    later_there = peer("b", view(1, 5.8), step(5, 5.9, 1))
    require_safe_steps_stay([DEAD, later_there], [])
    before = peer("b", view(2, 5.0), step(5, 5.9, 2))
    require_safe_steps_stay([DEAD, before], [])


def test_views_of_one_number_are_told_apart() -> None:
    """A peer that founds anew numbers its views from one on."""
    anew = peer("b", view(1, 7.0, "bc", "another"), step(5, 8.0, 1))
    with pytest.raises(Broken, match="b: step 5 again"):
        require_safe_steps_stay([DEAD, anew], [CRASH_S])


def test_its_own_word_holds_in_whatever_view() -> None:
    own = peer("a", view(1, 0.0), step(5, 5.5, 1, 6), step(5, 8.0, 1))
    with pytest.raises(Broken, match="a: step 5 again"):
        require_safe_steps_stay([own], [])
    alone = peer("a", view(1, 0.0, "a"), step(5, 5.5, 1, 6), view(2, 6.0), step(5, 8.0, 2))
    require_safe_steps_stay([alone], [])


def test_who_slept_has_not_what_a_smaller_part_has_told() -> None:
    """Seed 990777: two of five went on alone while the others slept, and one of the two died."""
    few = peer("a", view(2, 1.0, "ab"), step(5, 5.5, 2, 6))
    awake = peer("c", view(3, 7.0, "cde"), step(5, 8.0, 3), view(4, 9.0, "bcde"), step(6, 9.5, 4))
    with pytest.raises(Broken, match="c: step 5 again"):
        require_safe_steps_stay([few, awake], [CRASH_S])
    require_safe_steps_stay([few, awake], [CRASH_S], has_sleepers=True)
    most = peer("a", view(2, 1.0, "abc"), step(5, 5.5, 2, 6))
    with pytest.raises(Broken, match="c: step 5 again"):
        require_safe_steps_stay([most, awake], [CRASH_S], has_sleepers=True)
