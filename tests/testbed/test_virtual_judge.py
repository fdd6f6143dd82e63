"""What breaks a seed: of daemons that have ended, of evaluations and of ends of a private model."""

from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.errors import UNREACHABLE, UserError
from p2p_dtfm.testbed.virtual.peer import Ending
from p2p_dtfm.testbed.virtual.seeds import judge
from p2p_dtfm.testbed.virtual.seeds.judge import Broken, Reference


def reaches_nobody() -> UserError:
    return UserError("no initial peer can be reached", ("check the address",), UNREACHABLE)


def peer_of(*events: dict[str, Any], **values: Any) -> Any:
    return SimpleNamespace(name="a", events=lambda: list(events), failures=list, **values)


def ended(error: BaseException, was_in_a_view: bool) -> Any:
    return peer_of(
        past_endings=[Ending(error, has_run=True, was_in_a_view=was_in_a_view)], ended=None
    )


def test_who_reaches_nobody_as_it_begins_is_started_again_by_its_owner() -> None:
    judge._require_no_failure(ended(reaches_nobody(), was_in_a_view=False))


def test_nobody_that_took_part_ends_because_a_call_found_nobody() -> None:
    """Any call that nobody caught would come out as that."""
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
