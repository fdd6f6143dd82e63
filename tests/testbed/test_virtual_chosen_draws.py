"""Real daemons in virtual time: in the first step of a view no member has committed itself to what
it opens. The last of two colluders of eight to claim knew all other openings. It chose its own so
that each of the two was drawn for the other. What they computed in such steps stayed, at any rate.
Each run of the tests asks the draw itself (`tests/core/audit/test_draw.py`)."""

from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.testbed.virtual.seeds import player as players
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from tests.testbed.lying_to_the_end import lying_to_the_end, of_single_sequences

STEPS = 6


@pytest.fixture
def player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Player:
    """Plays a run that has a microbatch for each of eight: colluders are a quarter of the
    holders."""

    def of_eight(*arguments: Any) -> Path:
        return of_single_sequences(make_run(*arguments))

    monkeypatch.setattr(players, "make_run", of_eight)
    return Player(tmp_path, STEPS)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_who_chooses_what_it_opens_is_audited_by_somebody_honest_as_well(
    player: Player, seed: int
) -> None:
    found = player.play(LIES + seed, lying_to_the_end("chosen-draw", "abcdefgh", "gh", 1.0))
    assert found.problem == "" and found.lies and not found.stayed
    told = "\n".join(found.reports)
    assert "works otherwise than those who computed it again" in told, told


def of_seven(*arguments: Any) -> Path:
    """A run with work for seven."""
    run = of_single_sequences(make_run(*arguments))
    spec = RunSpec.model_validate_json(run.read_text())
    batch = spec.batch.model_copy(update={"global_batch": 7})
    run.write_text(spec.model_copy(update={"batch": batch}).model_dump_json())
    return run


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_so_it_is_where_one_of_the_honest_members_is_a_spare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two of seven stage-holders are more than a quarter of these. Each work had one auditor, and
    the last to claim chose it."""
    monkeypatch.setattr(players, "make_run", of_seven)
    schedule = lying_to_the_end("chosen-draw", "abcdefgh", "gh", 1.0)
    found = Player(tmp_path, STEPS).play(LIES + seed, schedule)
    assert found.problem == "" and found.lies and not found.stayed
