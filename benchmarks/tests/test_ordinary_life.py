"""The benchmark's figures of a history, and what it calls wrong."""

from typing import Any

from benchmarks.ordinary_life import Row, have_one_loss, longest_s, text_of, went_back


def step(number: int, time_s: float, loss: float = 1.0) -> dict[str, Any]:
    return {"event": "step", "step": number, "time_s": time_s, "loss": loss}


HISTORY = [step(0, 10.0), step(1, 11.0), step(2, 17.0), step(1, 17.5), step(2, 18.0)]


def test_the_longest_span_is_since_it_happened() -> None:
    assert longest_s(HISTORY, since_s=11.5) == 6.0
    assert longest_s(HISTORY, since_s=18.0) == 0.5
    assert longest_s(HISTORY[:1], since_s=10.0) is None


def test_steps_that_are_done_over_are_counted_and_may_not_differ() -> None:
    assert went_back(HISTORY) == 2
    assert went_back(HISTORY[:3]) == 0
    assert have_one_loss([HISTORY, HISTORY[:2]])
    assert not have_one_loss([HISTORY, [step(1, 30.0, loss=1.1)]])


def test_whoever_is_never_back_is_told_so() -> None:
    well = Row("kill", 5.0, 0.5, 2, one_loss_each=True)
    assert well.is_well and "5.0 s" in text_of(well)
    never = Row("kill", None, 0.5, 2, one_loss_each=True, why="not within 60 s: it pauses")
    assert not never.is_well and "never" in text_of(never) and "it pauses" in text_of(never)
    split = Row("kill", 5.0, None, 0, one_loss_each=False)
    assert not split.is_well and "LOSSES DIFFER" in text_of(split)
