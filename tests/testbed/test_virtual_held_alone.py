"""Real daemons in virtual time, in one pipeline. Each layer has one holder, so no other member
states the norm of its gradient. At any rate it was the holder's word alone: a norm as large as it
likes, by which all clip their updates to next to nothing."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from tests.testbed.pairs import planned_in_rows
from tests.testbed.test_virtual_lies_in_pipelines import FOUND

KIND, NAMES, CUTS = "own norm", "abc", (0, 2, 4)
STEPS = 8


def state_another_norm(lie: Lie) -> None:
    """The liar states the norm in its claim and in Prepared."""
    honest = Audits._claim

    def changed(local: Any) -> dict[str, Any]:
        """Changes the norm by a power of two. The norms of each holder's sums add up to the one
        that is stated for all."""
        norms = {n: tuple(4.0 * it for it in each) for n, each in local.norms.items()}
        squared = {n: 4.0 * it for n, it in local.squared_norms.items()}
        return {"squared_norms": squared, "norms": norms}

    async def claim(self: Any, here: Any, local: Any) -> Any:
        if lie.is_told(here.step):
            local = dataclasses.replace(local, **changed(local))
        return await honest(self, here, local)

    in_words.put(Audits, "_claim", claim)
    in_words.say_and_believe(lie, changed)


@pytest.mark.parametrize(
    "liar", ["b", *(pytest.param(it, marks=pytest.mark.nightly) for it in "ac")]
)
def test_a_norm_that_nobody_else_states_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liar: str
) -> None:
    monkeypatch.setitem(INSTALLED, KIND, state_another_norm)
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    planned_in_rows(monkeypatch, LIES, (NAMES,), CUTS)
    fault = Fault(1.0, math.inf, "lie", (liar,), 0.0, KIND)
    schedule = Schedule(tuple(NAMES), (), (fault,), is_audited=True, liars=(liar,), audit_rate=1.0)
    found = Player(tmp_path, STEPS).play(LIES, schedule)
    assert found.problem == "" and found.lies and not found.stayed
    assert any(FOUND in report for report in found.reports), found.reports


def test_a_norm_that_two_state_alike_of_what_they_alone_hold_is_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight members are in two pipelines of four stages: no other holder of that stage contradicts
    the two."""
    found = two_lie(tmp_path, monkeypatch, ("abcd", "efgh"), (0, 1, 3, 5), "cg")
    assert found.problem == "" and found.lies and not found.stayed
    assert found.reports and all(FOUND in report for report in found.reports), found.reports


def test_who_states_another_norm_than_two_others_that_hold_the_same_keeps_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six members are in three pipelines of two stages, and two of the stage's three holders lie
    together. The third holder was the one that went. Where unlike norms are stated, the work is
    computed again at any rate."""
    found = two_lie(tmp_path, monkeypatch, ("ab", "cd", "ef"), (0, 3), "ac", rate=1e-6)
    assert found.problem == "" and found.lies and not found.stayed
    assert found.reports and all(FOUND in report for report in found.reports), found.reports


def two_lie(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    rows: tuple[str, ...],
    cuts: tuple[int, ...],
    liars: str,
    rate: float = 1.0,
) -> Played:
    monkeypatch.setitem(INSTALLED, KIND, state_another_norm)
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    planned_in_rows(monkeypatch, LIES, rows, cuts)
    faults = tuple(Fault(1.0, math.inf, "lie", (it,), 0.0, KIND) for it in liars)
    schedule = Schedule(
        tuple(sorted("".join(rows))),
        (),
        faults,
        is_audited=True,
        liars=tuple(liars),
        audit_rate=rate,
        lie_together=True,
    )
    return Player(tmp_path, STEPS).play(LIES, schedule)
