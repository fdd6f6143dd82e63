"""Real daemons in virtual time: one member claims last, and so knows from the others' claims
whether it is drawn. By then the others have what a step needs of it, and claim what has come;
nobody had its loss. At any rate below one it stated a false loss wherever it was not drawn, to the
end, and nobody ever found that out."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.daemon.trainer.audited import audits
from p2p_dtfm.testbed.lies import in_words
from p2p_dtfm.testbed.lies.daemon import INSTALLED
from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.lies.putting import LieInTurn
from p2p_dtfm.testbed.virtual.seeds import player as players
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from tests.testbed.lying_to_the_end import lying_to_the_end, of_single_sequences
from tests.testbed.pairs import planned_in_rows
from tests.testbed.test_virtual_lies_in_pipelines import FOUND, colluders_play

STEPS = 16
RATE = 0.5
NIGHTLY = pytest.mark.nightly
TOLD_OTHERWISE = "has sent most of the others other gradients, sums or losses than it claims"


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(tmp_path_factory.mktemp("player"), STEPS)


@pytest.mark.parametrize(
    ("what", "seed"),
    [
        ("late-loss", 0),
        ("told-loss", 0),
        pytest.param("late-loss", 1, marks=NIGHTLY),
        pytest.param("told-loss", 1, marks=NIGHTLY),
    ],
)
def test_who_states_another_loss_where_it_is_not_drawn_is_held_to_what_it_told(
    player: Player, what: str, seed: int
) -> None:
    """`told-loss` tells the false loss before the draw. The lie stays where the liar is not drawn,
    like any lie. In the first step in which it is drawn, it has told another loss than it
    claims."""
    found = player.play(LIES + seed, lying_to_the_end(what, "abcd", "d", RATE))
    assert found.problem == "" and found.lies
    assert what == "told-loss" or not found.stayed
    assert any(TOLD_OTHERWISE in report for report in found.reports), found.reports


@NIGHTLY
@pytest.mark.parametrize("what", ["late-loss", "told-loss"])
def test_so_are_two_of_eight_of_which_one_knows_whether_its_colluder_is_drawn_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """At a rate of one it lied then as well."""

    def of_eight(*arguments: Any) -> Path:
        return of_single_sequences(make_run(*arguments))

    monkeypatch.setattr(players, "make_run", of_eight)
    player = Player(tmp_path, STEPS)
    found = player.play(LIES, lying_to_the_end(what, "abcdefgh", "gh", RATE))
    assert found.problem == "" and found.lies
    assert what == "told-loss" or not found.stayed
    told = [it for it in found.reports if FOUND in it or TOLD_OTHERWISE in it]
    assert told, found.reports


def state_losses_among_themselves(lie: LieInTurn) -> None:
    """The last of the two to claim knows whether it is drawn. The other one lies only in this: it
    says that no frame of its colluder told of a loss."""
    if lie._lying.ids[lie._name] == max(lie.colluders):
        INSTALLED["late-loss"](lie)  # type: ignore[arg-type]
    honest = audits.losses_told

    def losses_told(plan: Any, me: str, *rest: Any) -> dict[str, bytes]:
        told = honest(plan, me, *rest)
        return {it: b"" if it != me and it in lie.colluders else each for it, each in told.items()}

    in_words.put(audits, "losses_told", losses_told)


def test_two_that_alone_have_the_head_tell_the_stages_before_them(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight members are in two pipelines of four stages. The two told only each other, and stated
    what they liked in all steps that were not drawn."""
    kind = "losses among themselves"
    monkeypatch.setitem(INSTALLED, kind, state_losses_among_themselves)
    monkeypatch.setattr(putting, "WHILE_NOT_DRAWN", (*putting.WHILE_NOT_DRAWN, kind))
    planned_in_rows(monkeypatch, LIES, ("abcd", "efgh"), (0, 1, 3, 5))
    found = player.play(LIES, lying_to_the_end(kind, "abcdefgh", "dh", RATE))
    assert found.problem == "" and found.lies and not found.stayed
    assert found.reports and all(FOUND in report for report in found.reports), found.reports


@pytest.mark.parametrize(
    ("stages", "what", "told"),
    [
        pytest.param(("ace", "bdf"), "late-loss", FOUND, marks=NIGHTLY),
        pytest.param(("ace", "bdf"), "told-loss", "losses of", marks=NIGHTLY),
        pytest.param(("a", "b"), "late-loss", "", marks=NIGHTLY),
        pytest.param(("a", "b"), "told-loss", "losses of", marks=NIGHTLY),
    ],
)
def test_in_pipelines_it_tells_who_has_the_head_as_well_or_the_stage_before_it(
    player: Player,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[str, str],
    what: str,
    told: str,
) -> None:
    found = colluders_play(player, monkeypatch, stages, "b", what, rate=RATE)
    assert found.problem == "" and found.lies
    assert what == "told-loss" or not found.stayed
    assert found.reports and any(told in report for report in found.reports), found.reports
