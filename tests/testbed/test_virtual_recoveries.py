"""How long one fault holds up eight real daemons in virtual time."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.recoveries import STEPS, recovery_of
from p2p_dtfm.testbed.virtual.seeds.run import make_run


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "most_s"), [("kill", 1.0), ("pause", 3.0), ("partition", 3.5)])
def test_eight_daemons_go_on_soon(tmp_path: Path, kind: str, most_s: float) -> None:
    recovery = recovery_of(kind, 1, make_run(tmp_path, STEPS, STEPS), tmp_path / "world")
    assert recovery.held_up_s < most_s, recovery.phases_s
    assert recovery.wrongly_accused == []
    assert 0.1 < recovery.usual_step_s < 0.5
    assert recovery.phases_s["suspected"] > 0 or kind == "kill", "it was seen at all"


@pytest.mark.nightly
def test_who_stands_still_for_a_moment_is_accused_by_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS, STEPS)
    assert recovery_of("none", 1, run, tmp_path / "world", loaded_s=1.0).wrongly_accused == []
