"""Real daemons in virtual time: one of two colluders lies in its work where the other alone is
drawn to compute it again. The auditor tells some honest members that the work is false, and the
rest that all is well. Those that were told found that it was so, and went for it, as accusers of
whom most had not been told. Of eight honest members one went, or four at once, in a single step,
each time the draw fell so. Nobody ever blamed the colluders."""

from itertools import pairwise
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.lies import putting
from p2p_dtfm.testbed.virtual.seeds.playing import Play
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.lying_to_the_end import (
    lying_to_the_end,
    of_single_sequences,
    views_with_all_honest,
    with_lies,
)
from tests.testbed.pairs import planned_in_pairs

STEPS = 30
FEW = 8
"""Steps in which the colluders are drawn so, and are out, with these draws. The rest would be an
honest run, and each step of eight daemons costs a third of a second of processor."""
EIGHT = "abcdefgh"
FIRSTS, LASTS = "aceg", "bdfh"
NIGHTLY = pytest.mark.nightly
HALF_OF_ALL = 0.67
"""The honest members that are told: four of eight."""
DRAWN_SOON = LIES + 2
"""A seed in which a colluder is drawn alone within so few steps."""
SOON_S = 5.0
"""A time before anybody is accused."""
UNLIKE = "has said one thing to some"
SENT_OTHERS = "has sent most of the others other gradients"
"""Where few are told that the work is false, the others find its maker's lie. The maker is out
before its colluder is for its words."""


def played(
    tmp_path: Path,
    kind: str,
    members: str,
    liars: str,
    rate: float,
    steps: int = STEPS,
    seed: int = LIES,
) -> Play:
    """Requires that no honest member was ever out."""
    run = with_audits(of_single_sequences(make_run(tmp_path, steps)), rate, 5)
    kept = []

    async def scene(swarm: Swarm) -> None:
        one = await with_lies(swarm, run, lying_to_the_end(kind, members, liars, rate))
        views_with_all_honest(one)
        kept.append(one)

    play(seed, tmp_path / "world", scene)
    assert kept[0].lying.count, "nobody was drawn so"
    return kept[0]


@pytest.mark.parametrize(
    ("part", "rate", "steps", "reason"),
    [
        (HALF_OF_ALL, 1.0, FEW, UNLIKE),
        pytest.param(0.1, 1.0, STEPS, SENT_OTHERS, marks=NIGHTLY),
        pytest.param(0.1, 0.5, STEPS, SENT_OTHERS, marks=NIGHTLY),
    ],
)
def test_who_is_told_alone_that_a_false_work_is_false_keeps_its_place(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    part: float,
    rate: float,
    steps: int,
    reason: str,
) -> None:
    monkeypatch.setitem(putting.STRENGTHS, "whispered-doubt", part)
    one = played(tmp_path, "whispered-doubt", EIGHT, "gh", rate, steps)
    assert any(reason in report for report in one.lying.reports)


@pytest.mark.parametrize(
    ("liars", "steps"), [("fh", FEW), pytest.param("gh", STEPS, marks=NIGHTLY)]
)
def test_nor_does_who_is_told_so_in_pipelines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, liars: str, steps: int
) -> None:
    """Of another holder of the stage and of the work's maker one would be out."""
    planned_in_pairs(monkeypatch, LIES, FIRSTS, LASTS)
    one = played(tmp_path, "whispered-doubt", EIGHT, liars, 1.0, steps)
    assert any(UNLIKE in report for report in one.lying.reports)


def test_nor_does_who_alone_is_asked_to_audit_in_a_colluder_s_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned_in_pairs(monkeypatch, DRAWN_SOON, FIRSTS, LASTS)
    one = played(tmp_path, "whispered-refusal", EIGHT, "gh", 1.0, FEW, DRAWN_SOON)
    assert any(UNLIKE in report for report in one.lying.reports)


def test_who_whispers_of_a_true_work_is_out_as_well(tmp_path: Path) -> None:
    one = played(tmp_path, "whispered-doubt", "abcd", "d", 1.0, FEW)
    assert any(UNLIKE in report for report in one.lying.reports)


@pytest.mark.parametrize(
    ("kind", "members", "liars", "steps"),
    [
        ("audits-untold", "abcd", "d", 16),
        pytest.param("audits-untold", EIGHT, "gh", STEPS, marks=NIGHTLY),
        pytest.param("claims-untold", EIGHT, "gh", STEPS, marks=NIGHTLY),
    ],
)
def test_who_is_not_told_something_hears_it_from_others(
    tmp_path: Path, kind: str, members: str, liars: str, steps: int
) -> None:
    """Otherwise the member would wait for the liar, and all others for the member, until it was
    out."""
    one = played(tmp_path, kind, members, liars, 1.0, steps)
    assert not one.lying.reports
    for peer in one.honest():
        at_s = [it["at_s"] for it in peer.events() if it["event"] in ("view", "step")]
        assert max(later - earlier for earlier, later in pairwise(at_s)) < SOON_S


def test_who_tells_all_but_one_what_it_claims_holds_them_up_once_in_a_view(tmp_path: Path) -> None:
    """Each step took two seconds more, at any rate of audits: nobody is blamed for it."""
    one = played(tmp_path, "claims-untold", "abcd", "d", 0.02)
    for peer in one.honest():
        at_s = [it["at_s"] for it in peer.events() if it["event"] == "step"]
        assert len(at_s) >= STEPS and at_s[-1] - at_s[0] < STEPS / 3


@pytest.mark.parametrize(
    ("kind", "steps"), [("audits-denied", FEW), pytest.param("claims-denied", STEPS, marks=NIGHTLY)]
)
def test_who_says_that_it_waits_for_what_all_have_heard_is_waited_for_itself(
    tmp_path: Path, kind: str, steps: int
) -> None:
    """The named member knew first that the claim was heard, and alone accused the liar. Two
    colluders accused that member: five of six honest members were out, one after the other."""
    played(tmp_path, kind, EIGHT, "gh", 1.0, steps)
