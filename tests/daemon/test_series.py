"""The run's figures in bounded room."""

from p2p_dtfm.core.messages.prepared import StepOutcome
from p2p_dtfm.daemon.dashboard.series import Series


def outcome(step: int, held_out: float | None = None) -> StepOutcome:
    return StepOutcome(step, 1.0, 10.0 / (step + 1), 100, held_out, None)


def test_a_long_run_keeps_evenly_spaced_steps() -> None:
    series = Series(points_limit=100)
    for step in range(5000):
        series.committed(outcome(step), float(step))
    history = series.history()
    assert 50 <= len(history.step) < 100
    strides = {b - a for a, b in zip(history.step, history.step[1:], strict=False)}
    assert strides == {64}
    assert history.step[0] == 0 and history.step[-1] > 5000 - 64
    assert history.loss == tuple(10.0 / (step + 1) for step in history.step)
    assert len(history.tokens_per_s) == len(history.loss) == len(history.step)


def test_the_generation_changes_only_when_earlier_rows_do() -> None:
    series = Series(points_limit=100)
    seen = series.history()
    assert series.history() is seen, "unchanged: the same object"
    changes = 0
    for step in range(400):
        series.committed(outcome(step, held_out=1.0 if step % 10 == 0 else None), None)
        now = series.history()
        if now.generation == seen.generation:
            assert now.step[: len(seen.step)] == seen.step
            assert now.held_out_step[: len(seen.held_out_step)] == seen.held_out_step
        else:
            changes += 1
        seen = now
    assert changes == 3


def test_steps_without_training_and_views_are_told_apart() -> None:
    series = Series()
    series.view_took_over(0)
    series.committed(StepOutcome(9, 0.0, None, 0, 2.5, None), None)
    history = series.history()
    assert history.step == () and history.held_out_step == (9,) and history.held_out_loss == (2.5,)
    assert history.view_step == (0,)


def test_a_step_that_is_repeated_replaces_what_came_of_it_before() -> None:
    series = Series()
    for step in range(6):
        held_out = 9.0 if step % 2 == 0 else None
        series.committed(StepOutcome(step, 1.0, 5.0 - step, 1, held_out, None), 1.0)
    generation = series.history().generation
    series.committed(StepOutcome(3, 1.0, 1.5, 1, None, None), 1.0)
    history = series.history()
    assert history.step == (0, 1, 2, 3) and history.loss[-1] == 1.5
    assert history.held_out_step == (0, 2)
    assert history.generation > generation, "pages draw it anew"


def test_who_paused_after_the_first_step_goes_on_with_each_one_after_the_next_pause() -> None:
    """The distance between its first step and its second was taken for that between all."""
    first = Series(points_limit=100)
    for step in (3, *range(500, 560)):
        first.committed(outcome(step), None)
    again = Series(points_limit=100)
    again.take_up(first.history())
    for step in range(700, 710):
        again.committed(outcome(step), None)
    assert again.history().step[-10:] == tuple(range(700, 710))


def test_who_has_thinned_goes_on_so_after_a_pause() -> None:
    first = Series(points_limit=100)
    for step in range(5000):
        first.committed(outcome(step), None)
    again = Series(points_limit=100)
    again.take_up(first.history())
    for step in range(5000, 5200):
        again.committed(outcome(step), None)
    later = [step for step in again.history().step if step >= 5000]
    assert later == [5056, 5120, 5184]


def test_what_a_view_takes_back_is_drawn_no_more() -> None:
    """A liar's steps were taken back, and no step could be taken since for want of a plan. The page
    said step 3, and drew six."""
    series = Series()
    for step in range(6):
        held_out = 9.0 - step if step % 3 == 0 else None
        series.committed(StepOutcome(step, 1.0, 5.0 - step, 1, held_out, None), 1.0)
    generation = series.history().generation
    series.view_took_over(6)
    assert series.history().generation == generation, "nothing is lost"
    series.view_took_over(3)
    history = series.history()
    assert history.step == (0, 1, 2) and history.generation > generation
    assert history.held_out_step == (0, 3), "of the state that the view begins with"
    series.view_took_over(2)
    assert series.history().held_out_step == (0,)
