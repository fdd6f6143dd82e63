"""Steps that a peer has committed twice: a split excuses some of them, and nothing the others."""

from typing import Any

import pytest

from p2p_dtfm.testbed.chaos_verdict import MERGED_WITHIN_S, ChaosVerdict, judge
from p2p_dtfm.testbed.recovery.times import Event, Inflicted

SPLIT = Inflicted("partition", ("b",), 4, 4.5, 10.5)
STEPS = 30


def view(number: int, step: int, time_s: float, **more: Any) -> Event:
    facts = {"snapshot": f"s{number}", "plan": f"p{number}", "step": step, "time_s": time_s}
    return {"event": "view", "view": number, **facts, **more}


def steps(first: int, end: int, late_s: float = 0.0, loss: float = 1.0) -> list[Event]:
    """Commits of these steps, one a second."""
    return [
        {"event": "step", "step": n, "time_s": n + late_s, "loss": loss, "view": 1}
        for n in range(first, end)
    ]


def judged(histories: dict[str, list[Event]], *faults: Inflicted) -> ChaosVerdict:
    return judge(histories, faults, STEPS, 32, None)


LONGER = [view(1, 0, 0.0), *steps(0, 5), view(2, 5, 6.0), *steps(5, 15), view(4, 15, 15.5)]
LONGER += steps(15, STEPS)
"""Steps of the side that stays."""
SHORTER = [view(1, 0, 0.0), *steps(0, 5), view(3, 5, 7.0), *steps(5, 9, 2.5)]
"""Seconds until the other side counts."""
AFTER = [view(4, 15, 15.5), *steps(15, STEPS)]


def test_the_side_that_gives_up_commits_its_steps_again() -> None:
    merged = view(4, 7, 15.5)
    longer = [*LONGER[:7], *steps(5, 7), merged, *steps(7, STEPS, 20.0)]
    back = {"a": longer, "b": [*SHORTER, merged, *steps(7, STEPS, 20.0)]}
    verdict = judged(back, SPLIT)
    assert verdict.ok, verdict.violations
    assert (verdict.given_up_steps, verdict.duplicated_samples) == (2, 0)


def test_a_step_that_was_taken_back_and_never_done_again_is_lost() -> None:
    """It counted as committed, since somebody had committed it once."""
    took_back = [view(2, 27, 40.0), *steps(27, 28, 20.0), *steps(29, STEPS, 20.0)]
    first = view(1, 0, 0.0, may_repeat_steps=4)
    verdict = judged({name: [first, *steps(0, STEPS), *took_back] for name in "ab"})
    assert verdict.repeated_steps == 3, "as was said"
    assert verdict.lost_samples == 32 and verdict.committed_steps == STEPS - 1
    assert "1 step never committed, first 28" in verdict.violations[0]


def test_what_was_committed_before_or_after_a_split_is_not_given_up_for_it() -> None:
    """A swarm that was cut somewhere, at some time, may not do all steps twice from then on."""
    later = [view(7, STEPS, 35.0), view(5, 20, 40.0), *steps(20, STEPS, 30.0)]
    twice = {"a": [*LONGER, view(5, STEPS, 40.0)], "b": [*SHORTER, *AFTER, *later]}
    verdict = judged(twice, SPLIT)
    assert verdict.duplicated_samples == 10 * 32, "they were in one view since"
    assert "b committed step 20 twice" in verdict.violations[0]
    early = [view(1, 0, 0.0), *steps(0, 5), view(2, 2, 6.0), *steps(2, STEPS, 10.0)]
    stays = [view(1, 0, 0.0), *steps(0, 2), view(6, 2, 5.0), *early[6:]]
    verdict = judged({"a": stays, "b": early}, SPLIT)
    assert "b committed step 2 twice" in verdict.violations[0], "long before the split"


def test_what_commits_a_step_may_have_come_to_one_side_alone() -> None:
    """The commit came just before the cut."""
    alone = [view(1, 0, 0.0), *steps(0, 5), view(4, 4, 15.5), *steps(4, STEPS, 20.0)]
    others = [view(1, 0, 0.0), *steps(0, 4), view(2, 4, 6.0), view(4, 4, 15.5)]
    others += steps(4, STEPS, 20.0)
    verdict = judged({"a": others, "b": alone}, SPLIT)
    assert verdict.ok and verdict.given_up_steps == 1


def test_of_two_sides_one_stays() -> None:
    """Both sides went back to where they were parted, and did all their steps twice."""
    merged = view(4, 5, 15.5)
    both = {
        "a": [*LONGER[:17], merged, *steps(5, STEPS, 20.0)],
        "b": [*SHORTER, merged, *steps(5, STEPS, 20.0)],
    }
    verdict = judged(both, SPLIT)
    assert [it.split(" committed")[0] for it in verdict.violations] == ["a", "b"]
    newcomer = [merged, *steps(5, STEPS, 20.0)]
    assert not judged({**both, "c": newcomer}, SPLIT).ok, "who was never there has not stayed"


def test_sides_that_meet_much_later_are_not_parted_by_that_split() -> None:
    late_s = SPLIT.ended_s + MERGED_WITHIN_S + 1.0
    merged = view(4, 7, late_s)
    longer = [*LONGER[:7], *steps(5, 7), merged, *steps(7, STEPS, 200.0)]
    back = {"a": longer, "b": [*SHORTER, merged, *steps(7, STEPS, 200.0)]}
    assert "b committed step 7 twice" in judged(back, SPLIT).violations[0]
    for_good = Inflicted("cut", ("a", "b"), 4, 4.5, 4.5)
    assert judged(back, for_good).ok, "that one is mended when all are told to leave"


def test_steps_since_a_cut_are_no_side_of_a_split() -> None:
    """One peer is cut off from another, and the others go back to the newest whole copy, as they
    had said. Nobody has gone on from there without them."""
    first = view(1, 0, 0.0, may_repeat_steps=4)
    again = [view(2, 3, 8.0), *steps(3, STEPS, 10.0)]
    cut = Inflicted("cut", ("a", "c"), 4, 1.5, 9.0)
    verdict = judged({name: [first, *steps(0, 5), *again] for name in "ab"}, cut)
    assert verdict.ok and (verdict.repeated_steps, verdict.given_up_steps) == (2, 0)


def test_what_a_full_disk_has_not_kept_is_not_looked_at() -> None:
    """The disk may not have kept the view with which the peer gave its steps up."""
    merged = view(4, 7, 15.5)
    longer = [*LONGER[:7], *steps(5, 7), merged, *steps(7, STEPS, 20.0)]
    back = {"a": longer, "b": [*SHORTER, *steps(7, STEPS, 20.0)]}
    assert not judged(back, SPLIT).ok
    full = Inflicted("disk full", ("b",), 8, 14.0, 18.0)
    verdict = judged(back, SPLIT, full)
    assert verdict.ok and verdict.not_looked_at == ["steps committed twice at b"]
    other = Inflicted("disk full", ("a",), 8, 14.0, 18.0)
    assert not judged(back, SPLIT, other).ok
    before = Inflicted("disk full", ("b",), 1, 1.0, 2.0)
    assert not judged(back, SPLIT, before).ok


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_is_wrong(loss: float) -> None:
    history = [view(1, 0, 0.0), *steps(0, 4), *steps(4, 5, loss=loss), *steps(5, STEPS)]
    verdict = judge({"a": history}, [], STEPS, 32, lambda step: 1.0)
    assert "step 4 at a: the loss is no number" in verdict.violations[0]
    assert verdict.max_loss_difference == 0.0


def test_a_loss_that_nobody_has_computed_beside_it_is_not_compared() -> None:
    known = [1.0] * 10 + [float("nan")] * (STEPS - 10)
    history = [view(1, 0, 0.0), *steps(0, STEPS)]
    assert judge({"a": history}, [], STEPS, 32, known.__getitem__).ok
