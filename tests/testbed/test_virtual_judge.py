"""What the judge calls a broken seed: daemons that end, evaluations, and the ends of a private
model."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.testbed.virtual.peer import Ending
from p2p_dtfm.testbed.virtual.seeds import judge
from p2p_dtfm.testbed.virtual.seeds.judge import Broken, Reference
from p2p_dtfm.testbed.virtual.seeds.run import make_run, unlike_one


def reaches_nobody() -> UserError:
    return UserError("no initial peer can be reached", ("check the address",), UNREACHABLE)


def peer_of(*events: dict[str, Any], name: str = "a", **values: Any) -> Any:
    return SimpleNamespace(name=name, events=lambda: list(events), failures=list, **values)


def ended(error: BaseException, was_in_a_view: bool) -> Any:
    return peer_of(
        past_endings=[Ending(error, has_run=True, was_in_a_view=was_in_a_view)], ended=None
    )


def test_who_reaches_nobody_as_it_begins_is_started_again_by_its_owner() -> None:
    judge._require_no_failure(ended(reaches_nobody(), was_in_a_view=False))


def test_nobody_that_took_part_ends_because_a_call_found_nobody() -> None:
    """Any call error that nobody caught would come out as that."""
    with pytest.raises(Broken, match="a failed"):
        judge._require_no_failure(ended(reaches_nobody(), was_in_a_view=True))


def test_another_error_of_whoever_begins_is_a_failure() -> None:
    error = UserError("no file of that name", ("look for it",))
    assert error.exit_code != UNREACHABLE
    with pytest.raises(Broken, match="a failed"):
        judge._require_no_failure(ended(error, was_in_a_view=False))


def evaluated(*steps: int) -> Any:
    told = [{"event": "step", "step": n, "held_out_loss": 2.0} for n in steps]
    return peer_of({"event": "step", "step": 3, "held_out_loss": None}, {"event": "view"}, *told)


def test_each_evaluation_is_told_by_somebody(tmp_path: Any) -> None:
    reference = Reference([1.0] * 10, [1.0] * 10, {0: 2.0, 5: 1.9, 10: 1.8}, tmp_path)
    judge._require_evaluations([evaluated(0, 5), evaluated(10)], reference)
    with pytest.raises(Broken, match=r"held-out loss of the steps \[5, 10\]"):
        judge._require_evaluations([evaluated(0), evaluated()], reference)
    assert judge.has_last_evaluation([evaluated(10)], 10)
    assert not judge.has_last_evaluation([evaluated(5)], 10)


def test_who_is_not_named_has_neither_end() -> None:
    judge.require_ends_elsewhere(peer_of(layers=lambda: {1, 2}), 4)
    for end in (0, 3):
        with pytest.raises(Broken, match=rf"has the layers \[{end}\]"):
            judge.require_ends_elsewhere(peer_of(layers=lambda end=end: {1, end}), 4)


def told(name: str, snapshot: str, **step: Any) -> Any:
    at = {"at_s": 1.0, "view": 3}
    view = {"event": "view", "snapshot": snapshot, "members": ["a", "b"], **at}
    values = {"step": 5, "safe_step": None, "loss": 2.0, "gradient_norm": 1.0}
    return peer_of(
        view, {"event": "step", **at, **values, "held_out_loss": None, **step}, name=name
    )


def test_members_of_one_view_tell_the_same_of_a_step() -> None:
    one = told("a", "s")
    judge.require_told_alike([one, told("b", "s"), told("c", "s", held_out_loss=2.5)])
    judge.require_told_alike(
        [one, told("b", "another", loss=2.1), told("c", "s", step=6, loss=3.0)]
    )
    for what in ({"loss": 2.0000001}, {"gradient_norm": 0.9}):
        with pytest.raises(Broken, match="step 5 in one view: "):
            judge.require_told_alike([one, told("b", "s", **what)])
    with pytest.raises(Broken, match="held_out_loss"):
        evaluated_there = [told(it, "s", held_out_loss=n) for it, n in (("b", 2.5), ("c", 2.6))]
        judge.require_told_alike([one, *evaluated_there])


def test_runs_that_no_process_plays_alone_are_evaluated_as_well(tmp_path: Any) -> None:
    reference = unlike_one(make_run(tmp_path, 25))
    assert set(reference.held_out) == {0, 10, 20, 25} and not reference.is_like_one
    with pytest.raises(Broken, match=r"held-out loss of the steps \[20, 25\]"):
        judge._require_evaluations([evaluated(0, 10)], reference)


def test_somebody_has_told_what_such_a_run_comes_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The final loss is less than the first one, and the same at all members."""
    saved = SimpleNamespace(manifest=SimpleNamespace(layers={}))
    monkeypatch.setattr(judge, "saved_at", lambda peer, step: [saved])
    monkeypatch.setattr(judge, "is_whole", lambda checkpoint: True)

    def alike(**losses: float) -> None:
        steps = {int(name[1:]): loss for name, loss in losses.items()}
        told = [{"event": "step", "step": n, "held_out_loss": it} for n, it in steps.items()]
        judge._require_alike([peer_of(*told)], 10)

    alike(s0=2.0, s10=1.5)
    for losses in ({"s0": 2.0}, {"s10": 1.5}, {"s0": 2.0, "s10": 2.5}):
        with pytest.raises(Broken, match="held-out losses"):
            alike(**losses)
