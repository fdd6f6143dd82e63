"""What `chaos` says of a run at its end, and what it does not claim to have seen."""

import io
from dataclasses import asdict
from typing import Any

from rich.console import Console

from p2p_dtfm.cli.commands.chaos import summary
from p2p_dtfm.cli.scenarios.compared import EMULATED, not_compared
from p2p_dtfm.cli.scenarios.lies import lies_summary
from p2p_dtfm.testbed.lies.played import LieCase
from p2p_dtfm.testbed.lies.verdict import LieVerdict
from p2p_dtfm.testbed.plain_losses import NOTHING_SAVED

REPORT: dict[str, Any] = {
    **{"ok": True, "violations": [], "recovery_s": {}, "recovery_alone_s": {}},
    **{"recovery_phases_s": {}, "could_not_go_on": 0, "kept_microbatches": 0},
    **{"redone_microbatches": 0, "committed_steps": 30, "total_steps": 30, "views": 3},
    **{"usual_step_s": 0.2, "goodput": 0.9, "lost_samples": 0, "duplicated_samples": 0},
    **{"given_up_steps": 0, "repeated_steps": 0, "max_loss_difference": 1e-7},
}


def said(**changes: object) -> list[str]:
    console = Console(file=io.StringIO(), width=300)
    summary(console, {**REPORT, **not_compared(""), **changes})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_all_invariants_held_only_where_losses_were_compared() -> None:
    assert said()[-1] == "all invariants held"
    assert "one process 1.0e-07" in " ".join(said())
    for reason in (EMULATED, NOTHING_SAVED, 'the run has sync.mode = "local"'):
        unseen = said(max_loss_difference=None, **not_compared(reason))
        assert unseen[-1] == "held, as far as looked at; not losses"
        assert f"not compared: {reason}" in " ".join(unseen)
    assert not_compared(EMULATED) == {"not_looked_at": ["losses"], "not_compared": EMULATED}
    assert not_compared("") == {"not_looked_at": [], "not_compared": None}
    twice = "steps committed twice at peer-2"
    assert said(**not_compared("", [twice]))[-1] == f"held, as far as looked at; not {twice}"


def test_what_is_wrong_is_said_whatever_was_not_looked_at() -> None:
    wrong = said(ok=False, violations=["step 3 [twice]"], **not_compared(EMULATED))
    assert wrong[-2:] == ["violated: step 3 [twice]", "NOT ok"]


def said_of_a_lie(**found: Any) -> list[str]:
    case = LieCase("tiny", "flip", 1.0, 4, 1.0, 1)
    verdict = LieVerdict(caught_after={"peer-3": 1}, barred=["peer-3"], **found)
    told = {"promise": case.promise.text, "spoils": "", "ok": True}
    console = Console(file=io.StringIO(), width=300)
    lies_summary(console, {**asdict(case), **asdict(verdict), **told})
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_of_a_lie_no_harm_is_told_only_where_losses_were_compared() -> None:
    assert said_of_a_lie(max_loss_difference=1e-7)[-1] == "the lie did no harm"
    unseen = said_of_a_lie(not_compared=NOTHING_SAVED)
    assert unseen[-1] == "as promised, as far as looked at; not losses"
    assert f"not compared: {NOTHING_SAVED}" in " ".join(unseen)
