"""The one state of a daemon, as its user reads it."""

import pytest

from p2p_dtfm.daemon.telemetry.status import LongTask, State, Status


def test_there_is_a_reason_from_the_beginning_on() -> None:
    assert Status().state is State.STARTING and Status().reason


def test_who_leaves_is_leaving_until_it_has_left() -> None:
    status = Status()
    status.say(State.TRAINING, "step 1 of 9")
    status.say(State.LEAVING, "hands its layers over")
    status.say(State.TRAINING, "step 2 of 9")  # it trains on until others hold its layers
    assert (status.state, status.reason) == (State.LEAVING, "hands its layers over")
    status.say(State.STOPPED, "left")
    assert status.state is State.STOPPED


def test_something_long_says_how_far_it_is_and_how_long_yet(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 100.0
    status = Status(clock_s=lambda: now_s)
    caplog.set_level("INFO", "p2p_dtfm")
    status.advance(State.MEASURING, "times layers", 0, 4)
    assert status.reason == "times layers", "that nothing is done yet is no news"
    now_s += 30
    status.advance(State.MEASURING, "times layers", 1, 4)
    assert status.reason == "times layers: 25%, about 90 s left"
    assert status.as_json()["work"] == {"what": "times layers", "share": 0.25, "left_s": 90.0}
    assert caplog.messages[-1] == status.reason, "the log hears of it now and then"
    status.say(State.TRAINING, "step 1 of 9")
    assert status.as_json()["work"] is None


def test_a_file_that_comes_changes_no_state_and_is_told_while_somebody_waits_for_it() -> None:
    now_s = 0.0
    status = Status(clock_s=lambda: now_s)
    status.say(State.SYNCING, "3 of 6 layers to fetch")
    status.receives("states 1a", 0, 1000)
    now_s += 1
    status.receives("states 1a", 200, 1000)
    assert status.reason == "3 of 6 layers to fetch"
    assert status.work is not None and (status.work.share, status.work.left_s) == (0.2, 4.0)
    status.say(State.SYNCING, "2 of 6 layers to fetch")
    assert status.work is not None, "of the same wait"
    status.receives("states 1a", 0, 0)
    assert status.work is None
    status.say(State.TRAINING, "step 1 of 9")
    status.receives("data shard 2b", 5, 10)
    assert status.work is None


def test_files_that_come_at_once_are_one_task() -> None:
    """Each file began the estimate anew: "about 0 s left", for as long as several came."""
    now_s = 0.0
    status = Status(clock_s=lambda: now_s)
    status.say(State.SYNCING, "3 of 6 layers to fetch")
    for name in ("states 1a", "states 2b", "states 3c"):
        status.receives(name, 0, 1000)
    assert status.work == LongTask("fetches 3 files", 0.0, None)
    now_s += 2
    for name in ("states 1a", "states 2b"):
        status.receives(name, 300, 1000)
    assert status.work == LongTask("fetches 3 files", 0.2, 8.0)
    now_s += 2
    status.receives("states 1a", 1000, 1000)
    status.receives("states 1a", 0, 0)
    assert status.work == LongTask("fetches 2 files", 0.15, pytest.approx(4 * 1700 / 1300))
    status.receives("states 2b", 0, 0)  # it failed
    status.receives("states 4d", 0, 0)  # and so did one of which nothing ever came
    assert status.work is not None and status.work.what == "fetches states 3c"
    status.receives("states 3c", 0, 0)
    assert status.work is None
    status.advance(State.MEASURING, "times layers", 1, 4)
    status.receives("states 4d", 0, 0)
    assert status.work is not None, "which is none of it"


def test_what_was_there_before_says_nothing_of_how_long_the_rest_takes() -> None:
    """A download that continued said "about 0 s left" at first."""
    now_s = 0.0
    status = Status(clock_s=lambda: now_s)
    status.receives("states 1a", 900, 1000)
    now_s += 0.001
    status.receives("states 1a", 900, 1000)
    assert status.work is not None and (status.work.share, status.work.left_s) == (0.9, None)
    now_s += 0.999
    status.receives("states 1a", 910, 1000)
    assert status.work.left_s == pytest.approx(9)
    status.receives("states 1a", 0, 1000)  # of wrong bytes
    assert status.work.left_s == pytest.approx(100)


def test_all_is_said_of_nothing_less() -> None:
    assert str(LongTask("fetches data", 0.9999, 3.0)) == "fetches data: 99%, about 3 s left"
    assert str(LongTask("fetches data", 1.0, None)) == "fetches data: 100%"
