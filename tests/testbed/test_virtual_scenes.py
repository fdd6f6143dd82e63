"""Real daemons in virtual time: bugs that no tried seed had found, since the situations are narrow.
Each has a scene of its own that is green without it and red with it. Seeds with late words, or long
absences, have found three of them since."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from p2p_dtfm.core.recovery import view as views
from p2p_dtfm.testbed.virtual.planted.__main__ import BUGS
from p2p_dtfm.testbed.virtual.planted.bug import planted
from tests.testbed import scenes_of_lives as lives
from tests.testbed import scenes_of_steps as steps
from tests.testbed.test_virtual_seeds import FOUND_BY


class Scene(NamedTuple):
    """A scene. With the bug in the daemon, `play` raises the words of `fails`."""

    play: Callable[[Path, pytest.MonkeyPatch], None]
    fails: str


SLOW = {"founds-once"}
"""Scenes that take more than four seconds to play."""
FOUND_SINCE = {
    "guardian-ahead",
    "life-by-clock",
    "founds-once",
}
LOST = "(?s)they go on.*no member holds layers"
SCENES = {
    "early-prepared": Scene(steps.prepared_comes_before_the_view_that_it_is_of, "the step commits"),
    "prepared-gives-nothing": Scene(steps.who_takes_a_place_asks_late_for_its_states, "they go on"),
    "over-not-looked-at": Scene(steps.a_view_ends_while_data_come, "they go on"),
    "own-gradients-hidden": Scene(steps.who_has_committed_alone_needs_the_others_gradients, LOST),
    "guardian-ahead": Scene(steps.a_guardian_hears_late_what_its_holder_knows, LOST),
    "life-by-clock": Scene(lives.a_clock_is_put_right, "it is let in"),
    "founds-once": Scene(lives.a_founder_is_left_by_the_newcomer_that_it_founds_with, "it founds"),
    "end-not-shown": Scene(lives.one_is_let_in_with_the_last_step, "it hears of the end"),
    "no-handing-over": Scene(lives.who_leaves_at_last_is_the_only_one_to_give, "the other goes on"),
    "no-heartbeats": Scene(lives.two_that_wait_for_a_plan_hear_nothing_else, "they stay in it"),
    "believed": Scene(lives.a_saved_layer_is_damaged_while_its_daemon_is_away, "its losses"),
    "doubts-forgotten": Scene(lives.one_accuses_another_member_each_time, "no second honest"),
}


@pytest.fixture(autouse=True)
def guardians_of_their_own() -> Iterator[None]:
    """Forget guardians of earlier scenes: their views have the same names, and other guardians."""
    for remembered in (views._guards, views._pace):
        remembered.cache_clear()
    yield
    for remembered in (views._guards, views._pace):
        remembered.cache_clear()


def _names() -> list[Any]:
    nightly = pytest.mark.nightly
    return [pytest.param(it, marks=nightly) if it in SLOW else it for it in SCENES]


@pytest.mark.parametrize("name", _names())
def test_the_daemon_as_it_is_comes_through(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    SCENES[name].play(tmp_path, monkeypatch)


@pytest.mark.nightly
@pytest.mark.parametrize("name", SCENES)
def test_with_the_bug_it_does_not(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (bug,) = (bug for bug in BUGS if bug.name == name)
    with planted(bug), pytest.raises(AssertionError, match=SCENES[name].fails):
        SCENES[name].play(tmp_path, monkeypatch)


def test_every_planted_bug_is_found_by_a_seed_or_by_a_scene() -> None:
    assert FOUND_BY.keys() & SCENES.keys() == FOUND_SINCE
    assert {bug.name for bug in BUGS} == FOUND_BY.keys() | SCENES.keys()
