"""Speed and time left as measured now: the same on all peers, whenever they came."""

import pytest

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import Status
from p2p_dtfm.daemon.telemetry.step_rate import StepRate
from tests.core.builders import run_spec


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def step(pace: StepRate, clock: Clock, seconds: float, times: int = 1) -> None:
    for _ in range(times):
        clock.now_s += seconds
        pace.committed()


def test_before_the_first_step_of_a_view_nothing_is_known() -> None:
    clock = Clock()
    pace = StepRate(clock)
    assert pace.steps_per_s() is None
    pace.begins()
    clock.now_s += 5
    assert pace.steps_per_s() is None
    step(pace, clock, 1.0)
    assert pace.steps_per_s() == pytest.approx(1 / 6)


def test_who_has_just_come_says_what_the_others_say() -> None:
    clock = Clock()
    old, new = StepRate(clock), StepRate(clock)
    old.begins()
    step(old, clock, 0.5, 100)
    for pace in (old, new):
        pace.begins()
    for _ in range(7):
        clock.now_s += 0.2
        old.committed()
        new.committed()
    assert old.steps_per_s() == new.steps_per_s() == pytest.approx(5.0)


def test_a_step_that_does_not_end_counts_while_it_lasts() -> None:
    clock = Clock()
    pace = StepRate(clock)
    pace.begins()
    step(pace, clock, 0.1, 20)
    assert pace.steps_per_s() == pytest.approx(10.0)
    clock.now_s += 18.0
    assert pace.steps_per_s() == pytest.approx(1.0)


def test_the_window_is_half_a_minute_or_twenty_steps() -> None:
    clock = Clock()
    fast, slow = StepRate(clock), StepRate(clock)
    fast.begins()
    step(fast, clock, 1.0, 100)
    step(fast, clock, 0.1, 350)
    assert fast.steps_per_s() == pytest.approx(10.0, rel=0.01), "the slow ones are long ago"
    slow.begins()
    step(slow, clock, 10.0, 10)
    step(slow, clock, 5.0, 10)
    assert slow.steps_per_s() == pytest.approx(20 / 150), "fewer than twenty say little"


def test_it_is_settled_after_some_steps_and_seconds() -> None:
    clock = Clock()
    pace = StepRate(clock)
    pace.begins()
    step(pace, clock, 0.1, 50)
    assert not pace.is_settled
    step(pace, clock, 0.1, 60)
    assert pace.is_settled
    pace.begins()
    assert not pace.is_settled


def outcome(number: int) -> StepOutcome:
    return StepOutcome(number, 1.0, 5.5, 10, None, None)


def test_the_step_is_the_number_of_committed_ones_and_never_more_than_all() -> None:
    clock = Clock()
    spec = run_spec(total_steps=4)
    status = Status(clock_s=clock)
    history = RunHistory(spec, status)
    history.goes_on_from(0)
    for number in range(3):
        clock.now_s += 2.0
        history.record(outcome(number))
        assert status.figures()["step"] == number + 1
    assert status.figures()["tokens_per_s"] == pytest.approx(spec.tokens_per_step / 2, abs=0.1)
    assert status.figures()["eta_s"] == 2.0
    history.goes_on_from(1)
    assert status.figures()["step"] == 1, "steps that are repeated are not committed"
    for number in (1, 2, 3, 4):
        history.record(outcome(number))
    assert status.figures()["step"] == 4
    assert status.figures()["eta_s"] is None and status.figures()["tokens_per_s"] is None


def test_the_last_step_of_the_view_before_is_no_step_of_this_one() -> None:
    clock = Clock()
    status = Status(clock_s=clock)
    history = RunHistory(run_spec(), status)
    history.goes_on_from(0)
    history.goes_on_from(5)
    clock.now_s += 0.01
    history.record(outcome(4))  # it was applied only after the takeover
    assert status.figures()["tokens_per_s"] is None
