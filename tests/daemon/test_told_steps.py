"""A home tells a committed step once, though its daemon ends and starts again."""

from pathlib import Path

import pytest

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.daemon.telemetry.event_log import FILE_NAME, TAIL_BYTES, EventLog, read_events
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State, Status
from tests.core.builders import run_spec


def outcome(step: int) -> StepOutcome:
    return StepOutcome(step, 1.0, 2.0, 1, None, None)


def a_life(home: Path, first_step: int, told: list[int]) -> RunHistory:
    """The life of a daemon whose first view begins at that step."""
    events = EventLog(home / FILE_NAME)
    history = RunHistory(run_spec(), Status())
    history.told_before(events.last_step())

    def record(found: StepOutcome) -> None:
        told.append(found.step)
        events.write("step", step=found.step, loss=found.loss)
        events.write("view", view=1, step=found.step + 1)

    history.on_record = record
    history.goes_on_from(first_step)
    return history


def test_who_comes_back_and_rolls_a_step_forward_does_not_tell_it_again(tmp_path: Path) -> None:
    told: list[int] = []
    for step in range(5):
        a_life(tmp_path, step, told).record(outcome(step))
    back = a_life(tmp_path, 5, told)
    back.record(outcome(4))
    back.record(outcome(5))
    assert told == [0, 1, 2, 3, 4, 5]


def test_the_state_writes_a_step_as_the_bar_below_it_does(tmp_path: Path) -> None:
    """The state said "step 1234 of 6000" above a bar that said "step 1,234 of 6,000"."""
    spec = run_spec().model_copy(update={"total_steps": 6000})
    status = Status(State.TRAINING)
    history = RunHistory(spec, status)
    history.goes_on_from(1233)
    history.record(outcome(1233))
    assert status.reason == "step 1,234 of 6,000"


def test_what_it_had_not_told_it_tells_and_what_is_computed_again_too(tmp_path: Path) -> None:
    told: list[int] = []
    a_life(tmp_path, 0, told).record(outcome(0))
    a_life(tmp_path, 5, told).record(outcome(4))
    a_life(tmp_path, 3, told).record(outcome(3))
    assert told == [0, 4, 3]


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 60_000, '{"event": "step", "step": "x"}\n', "[1]\n", "\xff" * TAIL_BYTES],
)
def test_a_damaged_history_tells_of_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE_NAME).write_text(text)
    assert EventLog(tmp_path / FILE_NAME).last_step() == -1
    assert EventLog(tmp_path / "none").last_step() == -1
    assert not any(
        event.get("event") == "step" and event["step"] == 0 for event in read_events(tmp_path)
    )


def test_what_a_life_tells_first_is_not_glued_to_what_the_last_one_wrote_half(
    tmp_path: Path,
) -> None:
    """As a power cut leaves it, or a kill in the middle of a write: a whole line was lost by it,
    such as the view with which the peer went back."""
    EventLog(tmp_path / FILE_NAME).write("step", step=0)
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"time_s": 7, "event": "st')
    life = EventLog(tmp_path / FILE_NAME)
    life.write("view", view=2)
    life.write("step", step=1)
    found = [(event["event"], event.get("step")) for event in read_events(tmp_path)]
    assert found == [("step", 0), ("view", None), ("step", 1)]
    assert (tmp_path / FILE_NAME).read_text().count("\n") == 4, "no empty line"


def test_of_steps_that_are_lost_no_loss_is_told() -> None:
    """All members had lost all their steps: the daemon told the last loss beside "step 0"."""
    status = Status()
    history = RunHistory(run_spec(), status)
    history.goes_on_from(0)
    for step in range(4):
        history.record(StepOutcome(step, 2.0, 9.0 - step, 1, 19.0 - step, None))
    assert (status.facts["loss"], status.facts["held_out_loss"]) == (6.0, 16.0)
    history.goes_on_from(2)
    assert status.facts["loss"] == 8.0, "step 1 is the last one that stays"
    assert status.facts["held_out_loss"] == 17.0, "of the states from which step 2 starts"
    history.goes_on_from(0)
    assert status.facts["loss"] is None and status.facts["held_out_loss"] == 19.0
