"""How long one fault holds up eight real daemons in virtual time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.testbed.recovery.times import longest_without_s
from p2p_dtfm.testbed.virtual.recoveries import STEPS, HeardAccusation, is_recovered, recovery_of
from p2p_dtfm.testbed.virtual.seeds.run import make_run


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "most_s"), [("kill", 1.0), ("pause", 3.0), ("partition", 3.5)])
def test_eight_daemons_go_on_soon(tmp_path: Path, kind: str, most_s: float) -> None:
    recovery = recovery_of(kind, 1, make_run(tmp_path, STEPS, STEPS), tmp_path / "world")
    assert recovery.held_up_s < most_s and recovery.is_recovered, recovery.phases_s
    assert recovery.wrongly_accused == []
    assert 0.1 < recovery.usual_step_s < 0.5
    assert recovery.phases_s["suspected"] > 0 or kind == "kill", "it was seen at all"


@pytest.mark.nightly
def test_who_stands_still_for_a_moment_is_accused_by_nobody(tmp_path: Path) -> None:
    run = make_run(tmp_path, STEPS, STEPS)
    assert recovery_of("none", 1, run, tmp_path / "world", loaded_s=1.0).wrongly_accused == []


def test_a_swarm_that_never_goes_on_is_held_up_to_the_end() -> None:
    commits = [(n, float(n)) for n in range(10)]
    assert longest_without_s(commits, 9.5, 21.5) == 12.0, "it was nothing"
    assert not is_recovered(commits, 9.5, 21.5, 1.0)
    one_more = [*commits, (10, 9.75)]
    assert longest_without_s(one_more, 9.5, 21.5) == 11.75
    assert not is_recovered(one_more, 9.5, 21.5, 1.0)
    goes_on = [*commits, *((n, n + 4.0) for n in range(10, 18))]
    assert longest_without_s(goes_on, 9.5, 21.5) == 4.5
    assert is_recovered(goes_on, 9.5, 21.5, 1.0)
    assert is_recovered(commits, 5.5, 9.5, 1.0) and longest_without_s(commits, 9.0, 9.0) == 0.0


def test_in_a_partition_nobody_may_accuse_one_of_its_own_side() -> None:
    side: Any = [SimpleNamespace(name=name, peer_id=f"id-{name}") for name in "ab"]
    for by, of_name, is_wrong in (("a", "b", True), ("a", "c", False), ("c", "b", False)):
        accusation = HeardAccusation(by, f"id-{of_name}", "is silent")
        assert accusation.is_wrong("partition", side) == is_wrong
    assert HeardAccusation("c", "id-d", "is silent").is_wrong("partition", side)
    assert HeardAccusation("c", "id-d", "is silent").is_wrong("cut", side)
    assert not HeardAccusation("a", "id-b", "is silent").is_wrong("kill", side)
