"""Real daemons in virtual time, in pipelines whose ends hold one matrix: a liar gives the other end
another sum of the matrix than its own end has. Nobody said anything of these sums, so their results
stayed. The honest members were out, as they had other norms and parameters than the rest. (Audits
are there to have the lie noted: the planner makes such pipelines in runs without.)"""

import json
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.step.reduction.tied_sums import TiedSums
from p2p_dtfm.testbed.lies import in_work
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.lies.lie import Lie
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds import player as players
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from tests.testbed.test_virtual_lies_in_pipelines import colluders_play

KIND, STEPS = "tied", 10
NIGHTLY = pytest.mark.nightly


def give_another_sum(lie: Lie) -> None:
    """Another sum, of the same norm."""
    honest = TiedSums._copied

    def copied(self: Any, end: int, reduced: Any) -> Any:
        matrix = honest(self, end, reduced)
        return matrix.flip(0) if lie.is_told(self._step) else matrix

    in_work.put(TiedSums, "_copied", copied)


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    def tied(*arguments: Any) -> Path:
        run = make_run(*arguments)
        spec = json.loads(run.read_text())
        spec["model"]["tied_head"] = True
        run.write_text(json.dumps(spec))
        return run

    monkeypatch.setattr(players, "make_run", tied)
    monkeypatch.setitem(INSTALLED, KIND, give_another_sum)
    monkeypatch.setattr(putting, "IN_WORK", (*putting.IN_WORK, KIND))
    return Player(tmp_path, STEPS)


@pytest.mark.parametrize(
    ("stages", "liar"),
    [
        (("ace", "bdf"), "b"),
        pytest.param(("ace", "bdf"), "a", marks=NIGHTLY),
        pytest.param(("ac", "bd"), "b", marks=NIGHTLY),
        pytest.param(("a", "b"), "b", marks=NIGHTLY),
    ],
)
def test_who_gives_the_other_end_another_sum_is_in_doubt_and_nothing_of_it_stays(
    player: Player, monkeypatch: pytest.MonkeyPatch, stages: tuple[str, str], liar: str
) -> None:
    found = colluders_play(player, monkeypatch, stages, liar, KIND)
    assert found.problem == "" and found.lies and not found.stayed
    told = "leaves out one of"
    assert found.reports and all(told in it and "tied" in it for it in found.reports), found.reports


@NIGHTLY
def test_with_a_tied_matrix_other_lies_are_found_as_ever(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = colluders_play(player, monkeypatch, ("ace", "bdf"), "b", "flip")
    assert found.problem == "" and found.lies and not found.stayed
