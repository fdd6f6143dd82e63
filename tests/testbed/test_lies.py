"""A liar's gradients differ from the true ones, or the lie would show nothing. A run is judged by
what the design promises of its kind of lie, also where it promises that nobody finds it out."""

import math

import pytest
import torch

from p2p_dtfm.daemon.machine import world
from p2p_dtfm.daemon.node import daemon
from p2p_dtfm.daemon.peers.self_record import SelfRecord
from p2p_dtfm.testbed.lies.daemon import INSTALLED, be_equal_and_near
from p2p_dtfm.testbed.lies.gradients import BENT_PART, GRADIENT_LIES
from p2p_dtfm.testbed.lies.kinds import KINDS, NEXT_STAGE, undone
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.lies.played import LieCase, compare_losses, liars_of
from p2p_dtfm.testbed.lies.verdict import (
    IN_DOUBT,
    LEFT_OUT,
    LieVerdict,
    judge,
    what_it_cost,
    what_was_undone,
    when_it_was_fair,
    who_was_caught,
)
from tests.core.builders import run_spec

HONEST, OTHER, LIAR = "a", "b", "z"


def lied(kind: str, strength: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    honest = torch.randn(2 * BENT_PART)
    false = honest.clone()
    GRADIENT_LIES[kind](false, Lie(kind, 5, strength), torch.full_like(honest, 7.0))
    return honest, false


@pytest.mark.parametrize("kind", sorted(GRADIENT_LIES))
@pytest.mark.parametrize("strength", [1.0, 0.1])
def test_each_lie_changes_bits(kind: str, strength: float) -> None:
    honest, false = lied(kind, strength)
    assert not torch.equal(honest, false) and torch.isfinite(false).all()


def test_strengths_are_what_they_say() -> None:
    for kind, strength, factor in (("flip", 1.0, -1.0), ("flip", 0.1, 0.8), ("scale", 0.5, 1.5)):
        honest, false = lied(kind, strength)
        torch.testing.assert_close(false, factor * honest)
    honest, false = lied("bend")
    assert int((honest != false).sum()) == 2
    honest, false = lied("noise", 0.1)
    assert 0.05 < float((false - honest).norm() / honest.norm()) < 0.2
    assert set(lied("replay")[1].tolist()) == {7.0}


def test_each_kind_is_told_by_something() -> None:
    of_audits = {"accuse", "lazy"}
    assert INSTALLED.keys() | of_audits == KINDS.keys() and not INSTALLED.keys() & of_audits


def test_daemons_that_say_they_are_equal_compute_with_the_threads_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for owner, name in (
        (world.Machine, "measure_device"),
        (daemon, "exclusive_name"),
        (SelfRecord, "make"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # as it is again afterwards
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    be_equal_and_near()
    world.Machine().measure_device(run_spec(), "cpu", 3, None, lambda done, total: None)
    assert told == [3]


def case_of(kind: str, peers: int = 4, rate: float = 1.0) -> LieCase:
    return LieCase("tiny", kind, 1.0, peers, rate, peers // 4)


def test_a_case_has_time_to_draw_its_liars() -> None:
    seldom, always = case_of("flip", rate=0.01), case_of("flip")
    assert seldom.steps > always.steps and seldom.limit_s > 2000 > 500 > always.limit_s
    assert always.within == 2 and seldom.within == 500 < seldom.steps
    confession = case_of("confess", rate=0.02)
    assert confession.within == 12 < confession.steps < 50, "its promise is for that rate"
    assert case_of("speed").within is None


def test_who_is_to_send_something_on_is_no_last_stage() -> None:
    ids = {"peer-0": "b", "peer-1": "e", "peer-2": "a", "peer-3": "f", "peer-4": "c", "peer-5": "d"}
    assert liars_of(case_of("flip", peers=6), ids) == ["peer-5"]
    assert liars_of(case_of("held-out-sent", peers=6), ids) == ["peer-4"], "a, c and e are firsts"


def test_what_daemons_say_of_liars_and_of_doubts_is_told_apart() -> None:
    text = "leaves out abc: works otherwise\nleaves out one of def and ghi: unlike"
    assert LEFT_OUT.findall(text) == ["abc"] and IN_DOUBT.findall(text) == [("def", "ghi")]
    both = "leaves out both abc and def: come to unlike works of abc"
    assert not LEFT_OUT.findall(both) and IN_DOUBT.findall(both) == [("abc", "def")]


def view(
    step: int, *members: str, layers: tuple[tuple[int, int] | None, ...] = ()
) -> dict[str, object]:
    held = [*layers] or [(0, 4) for _ in members]
    told = {"members": list(members), "layers": held, "time_s": float(step)}
    return {"event": "view", "step": step, **told}


def step(number: int, time_s: float, held_out: float | None = None) -> dict[str, object]:
    told = {} if held_out is None else {"held_out_loss": held_out}
    return {"event": "step", "step": number, "loss": 1.0, "time_s": time_s, **told}


def test_who_is_out_and_back_and_out_again_is_counted() -> None:
    history = [
        view(0, HONEST, OTHER, LIAR),
        view(6, HONEST, OTHER),
        view(9, HONEST, OTHER, LIAR),
        view(9, HONEST, LIAR),
    ]
    verdict = LieVerdict()
    who_was_caught(history, {LIAR: "peer-2"}, 5, verdict)
    what_it_cost(history, {HONEST: "peer-0", OTHER: "peer-1"}, 5, verdict)
    assert verdict.caught_after == {"peer-2": 2} and verdict.came_back == 1
    assert verdict.views == 3 and verdict.honest_out == ["peer-1"]


def test_who_has_no_layers_yet_does_not_lie_yet() -> None:
    spare = view(0, HONEST, OTHER, LIAR, layers=((0, 4), (0, 4), None))
    history = [spare, view(9, HONEST, OTHER, LIAR), view(11, HONEST, OTHER)]
    verdict = LieVerdict()
    who_was_caught(history, {LIAR: "peer-2"}, 5, verdict)
    assert verdict.caught_after == {"peer-2": 3} and not verdict.had_no_work

    never = LieVerdict()
    who_was_caught([spare], {LIAR: "peer-2"}, 5, never)
    judge(KINDS["flip"].promise, 2, 1e-4, never)
    assert never.had_no_work == ["peer-2"] and not never.caught_after
    assert never.violations[0].startswith("no liar had work to lie about")


def test_whoever_is_out_in_its_very_first_lying_step_has_lied() -> None:
    verdict = LieVerdict()
    who_was_caught([view(0, HONEST, LIAR), view(5, HONEST)], {LIAR: "peer-1"}, 5, verdict)
    assert verdict.caught_after == {"peer-1": 1} and not verdict.had_no_work


def test_the_last_stage_sends_nothing_on_that_it_could_lie_about() -> None:
    stages = ((0, 2), (2, 4), (2, 4))
    history = [
        view(0, HONEST, OTHER, LIAR, layers=stages),
        view(6, HONEST, OTHER, layers=stages[:2]),
    ]
    verdict = LieVerdict()
    who_was_caught(history, {LIAR: "peer-2"}, 5, verdict, NEXT_STAGE)
    assert verdict.had_no_work == ["peer-2"]
    verdict = LieVerdict()
    who_was_caught(history, {LIAR: "peer-2"}, 5, verdict)
    assert verdict.caught_after == {"peer-2": 2}


def test_of_what_is_said_once_in_ten_steps_these_count() -> None:
    history = [view(0, HONEST, LIAR), view(25, HONEST, LIAR), view(30, HONEST)]
    verdict = LieVerdict()
    who_was_caught(history, {LIAR: "peer-1"}, 10, verdict, every=10)
    assert verdict.caught_after == {"peer-1": 3}, "10, 20 and 30"


def test_what_a_lie_cost_is_the_longest_wait_and_what_was_undone() -> None:
    times = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 7.0), (4, 8.0)]
    history = [step(number, time_s) for number, time_s in times]
    history += [step(2, 9.0), step(5, 10.0, held_out=4.0)]
    verdict = LieVerdict()
    what_it_cost(history, {}, 2, verdict)
    assert (verdict.usual_step_s, verdict.held_up_s) == (1.0, 4.0)
    assert verdict.repeated_steps == 1 and verdict.held_out_losses == {5: 4.0}


def undoing(*steps: int, all_of_it: bool = True, peer: str = LIAR) -> LieVerdict:
    """A verdict for a liar from step 40 on, as told by a peer that went back `from_step` to
    `to_step`."""
    from_step, to_step = steps
    back = {"event": "went back", "from_step": from_step, "step": to_step, "peers": [peer]}
    history = [
        {"view": 1, **view(0, HONEST, OTHER, LIAR)},
        {"view": 3, **view(to_step, HONEST, OTHER)},
        {"view": 3, "all_of_it": all_of_it, **back},
        *[step(number, float(number)) for number in range(from_step)],
        *[step(number, float(number)) for number in range(to_step, 65)],
    ]
    verdict = LieVerdict(max_loss_difference=1e-7, barred=[LIAR])
    who_was_caught(history, {LIAR: LIAR}, 40, verdict)
    what_it_cost(history, {}, 40, verdict)
    spec = run_spec(audit={"rate": 0.2, "undo_steps": 20})
    what_was_undone(history, {LIAR: LIAR}, spec, verdict)
    judge(undone(KINDS["flip"].promise), 25, 1e-4, verdict)
    return verdict


def test_where_lies_are_undone_all_of_them_must_be_and_by_no_more_than_is_promised() -> None:
    found = undoing(59, 30)
    assert not found.violations and found.is_undone and found.caught_after == {LIAR: 20}
    assert (found.undone_steps, found.repeated_steps, found.undo_limit) == (29, 29, 30)
    not_all = "what a liar did was not undone, or not all of it"
    assert undoing(59, 30, all_of_it=False).violations == [not_all]
    assert undoing(64, 40).violations == [not_all], "it was found later than is undone"
    assert undoing(59, 30, peer=OTHER).violations == [not_all]
    assert undoing(59, 20).violations == ["39 steps undone, which is more than promised"]


def test_a_case_with_an_undo_has_honest_steps_before_and_promises_more() -> None:
    case = LieCase("tiny", "confess", 1.0, 4, 0.02, 1, undo=20)
    assert case.from_step == 40 and case.steps == 65 and case.within == 12
    assert case.promise.text.endswith("what it did is undone") and not case.promise.spoils
    assert undone(KINDS["norm"].promise) == KINDS["norm"].promise, "it bars nobody"
    assert case.spec(run_spec()).audit.undo_steps == 20


def test_losses_that_cannot_be_one_processs_are_not_compared() -> None:
    """Trimmed sums go with audits, and the plain loop has no audits."""
    case, verdict = LieCase("tiny", "flip", 1.0, 4, 1.0, 1), LieVerdict()
    compare_losses([], case, case.spec(run_spec(sync={"sums": "trimmed"})), verdict)
    assert verdict.max_loss_difference is None
    assert verdict.not_compared is not None and "trimmed" in verdict.not_compared


def judged(kind: str, **found: object) -> list[str]:
    verdict = LieVerdict(**{"max_loss_difference": 1e-7, **found})  # type: ignore[arg-type]
    case = case_of(kind)
    judge(case.of.promise, case.within, 1e-4, verdict)
    return verdict.violations


def test_a_run_is_judged_by_what_is_promised_of_its_kind() -> None:
    barred = {"caught_after": {"z": 1}, "barred": ["z"]}
    never = {"caught_after": {"z": None}}
    assert not judged("flip", **barred)
    assert judged("flip", caught_after={"z": 3}, barred=["z"])[0].startswith("z was caught in its")
    assert judged("flip", **never) == ["z lied to the end", "z is not barred"]
    assert judged("flip", caught_after={"z": 1}) == ["z is not barred"]
    assert not judged("norm", caught_after={"z": 1})
    few = {"lying_steps": {"z": 2}}
    assert not judged("norm", **never, **few), "then it had no work, and nothing to be found in"
    assert judged("flip", **never, **few) == ["z is not barred"]
    assert not judged("lazy", **never)


def test_whatever_the_kind_no_honest_one_may_suffer() -> None:
    barred = {"caught_after": {"z": 1}, "barred": ["z"]}
    for harm in (
        {"false_bars": ["a"]},
        {"wrongly_left_out": ["a"]},
        {"honest_out": ["a"]},
        {"repeated_steps": 1},
        {"max_loss_difference": 1e-3},
        {"max_loss_difference": math.nan},
    ):
        assert len(judged("flip", **barred, **harm)) == 1, harm
    one_of_two = {"caught_after": {"z": None}, "honest_out": ["a"]}
    assert not judged("edge-in", **one_of_two), "it may cost the honest one its place"
    assert judged("edge-in", **one_of_two, false_bars=["a"])


def commits(took_s: list[float]) -> list[dict[str, object]]:
    ends_s = [sum(took_s[: at + 1]) for at in range(len(took_s))]
    return [step(number, end_s) for number, end_s in enumerate(ends_s)]


@pytest.mark.parametrize(
    ("took_s", "fair_from", "faults"),
    [
        ([4.0] * 12 + [1.2] * 40, 13, 0),
        ([4.0] * 35 + [1.2] * 20, 36, 1),
        ([4.0] * 50, None, 1),
        ([4.0] * 12 + [1.2] * 20 + [4.0] * 20, 13, 1),
        ([4.0] * 10, None, 0),
    ],
)
def test_work_that_is_not_taken_back_breaks_the_promise(
    took_s: list[float], fair_from: int | None, faults: int
) -> None:
    verdict = LieVerdict()
    when_it_was_fair(commits(took_s), 1.0, verdict)
    judge(KINDS["speed"].promise, None, 1.0, verdict)
    assert len(verdict.violations) == faults
    assert verdict.fair_from is None or abs(verdict.fair_from - (fair_from or 0)) <= 3
    assert (verdict.fair_from is None) == (fair_from is None)
