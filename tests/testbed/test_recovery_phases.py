"""Where the time of a recovery went."""

from typing import Any

import pytest

from p2p_dtfm.daemon.telemetry.event_log import RecoveryMarks
from p2p_dtfm.testbed.recovery.phases import PHASES, phases_of, recovery_phases
from p2p_dtfm.testbed.recovery.times import Inflicted

KILL = Inflicted("kill", ("b",), 3, 10.0, 12.0)
COMMITS = [(2, 9.0), (3, 14.0), (4, 15.0)]


def view(snapshot: str, time_s: float, *marks_s: float) -> dict[str, Any]:
    names = ("stopped_s", "gathered_s", "planned_s")
    marks = dict(zip(names, marks_s, strict=False))
    return {"event": "view", "view": 3, "snapshot": snapshot, "time_s": time_s, **marks}


def step(number: int, time_s: float, view_number: int = 3) -> dict[str, Any]:
    return {
        "event": "step",
        "view": view_number,
        "step": number,
        "loss": 1.0,
        "time_s": time_s,
    }


def test_phases_add_up_to_the_time_without_a_commit() -> None:
    histories = {
        "a": [view("s", 12.5, 10.5, 11.0, 12.0), step(1, 13.25), step(2, 13.5), step(3, 14.0)],
        "c": [view("s", 13.0, 11.0, 11.5, 11.75)],
        "b": [view("s", 99.0, 98.0, 98.0, 98.0)],
    }
    found = phases_of(histories, COMMITS, KILL)
    assert list(found.values()) == [0.5, 1.0, 0.5, 1.0, 0.25, 0.75] and tuple(found) == PHASES
    assert sum(found.values()) == 14.0 - KILL.began_s
    assert recovery_phases(histories, COMMITS, [KILL, KILL])["kill"]["planned"] == {
        "count": 2,
        "median": 0.5,
        "worst": 0.5,
    }


def test_without_steps_to_repeat_the_first_step_is_the_last_phase() -> None:
    late = step(1, 13.5, view_number=2)  # of the view before, at a peer that hears of it late
    histories = {"a": [view("s", 13.0, 10.5, 11.0, 12.0), late, step(3, 14.0)]}
    found = phases_of(histories, COMMITS, KILL)
    assert (found["first step"], found["repeated"]) == (1.0, 0.0)


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([], id="no view followed"),
        pytest.param([view("s", 13.0)], id="a planned view"),
        pytest.param([view("s", 9.5, 9.0, 9.1, 9.2)], id="of an earlier failure"),
        pytest.param([view("s", 16.0, 11.0, 12.0, 13.0)], id="nothing was committed after it"),
    ],
)
def test_without_a_stopped_step_there_are_no_phases(history: list[dict[str, Any]]) -> None:
    assert not phases_of({"a": history}, COMMITS, KILL)


def test_what_a_later_fault_stopped_is_not_said_of_the_one_before() -> None:
    """A full disk stopped nothing. The report said that it was suspected after 34.7 s: this was the
    suspicion of a later kill."""
    full = Inflicted("disk full", ("b",), 3, 10.0, 12.0)
    kill = Inflicted("kill", ("c",), 9, 40.0, 42.0)
    commits = [(step, 9.0 + 4 * step) for step in range(10)]
    histories = {"a": [view("s", 41.5, 40.5, 41.0, 41.25), step(8, 42.0)]}
    assert not phases_of(histories, commits, full)
    assert phases_of(histories, commits, kill)["suspected"] == 0.5


def test_marks_are_of_failures_alone_and_taken_once() -> None:
    marks = RecoveryMarks()
    marks.gathered()
    marks.planned()
    assert marks.take() == {}, "a planned view stops no step"
    marks.stopped()
    marks.gathered()
    marks.planned()
    assert set(marks.take()) == {"stopped_s", "gathered_s", "planned_s"}
    assert marks.take() == {}


def test_an_attempt_that_a_failure_overtakes_leaves_no_marks() -> None:
    marks = RecoveryMarks()
    marks.gathered()
    marks.planned()
    marks.stopped()
    assert set(marks.take()) == {"stopped_s"}
