"""Real daemons in virtual time: a member shows what audits ask it for, but late. An auditor that
waited for that was taken for a peer that stands still. Of four members two honest ones were out at
once, and the run went on with the liar and one other."""

from pathlib import Path

import pytest

from p2p_dtfm.testbed.lies.kinds import KINDS
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import (
    lying_to_the_end,
    of_single_sequences,
    views_with_all_honest,
    with_lies,
)

STEPS = 8


@pytest.mark.parametrize(
    ("members", "liars", "late_s"),
    [
        ("abcd", "d", 8.0),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (("abcd", "d", 20.0), ("abcd", "a", 8.0), ("abcdefgh", "gh", 8.0))
        ),
    ],
)
def test_who_shows_late_what_audits_ask_for_costs_no_honest_one_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: str, liars: str, late_s: float
) -> None:
    kind = KINDS["shown-late"]._replace(strength=late_s)
    monkeypatch.setitem(KINDS, "shown-late", kind)
    run = with_audits(of_single_sequences(make_run(tmp_path, STEPS)), 1.0, 5)
    schedule = lying_to_the_end("shown-late", members, liars, 1.0)

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, schedule)
        assert one.lying.count
        seen = views_with_all_honest(one)
        assert all(any(liar not in view for view in seen) for liar in one.lying.names), "out"

    play(LIES, tmp_path / "world", scene)
