"""Real daemons in virtual time in pipelines of two stages, some of which lie. An auditor that has
not got a stage's layers is given its parameters. It computes the stage's work again from what the
stage's neighbours have claimed to have sent."""

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from p2p_dtfm.daemon.step import lent_parameters
from p2p_dtfm.testbed.virtual.lies.putting import LieInTurn
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.run import make_run, with_audits
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule
from p2p_dtfm.testbed.virtual.seeds.watching.words import Blames
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from tests.testbed.begun import begun
from tests.testbed.pairs import has_evaluated, planned_in_pairs

FIRSTS, LASTS = "ace", "bdf"
"""`a` and `b` are the first pair, through which one of the two held-out microbatches goes."""
STEPS = 12
NIGHTLY = pytest.mark.nightly
COLLUDERS = ("ac", "ce", "eg", "bd", "bf", "fh", "dh")
FOUND, DOUBTED = "works otherwise than those who computed it again", "leaves out one of"


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(tmp_path_factory.mktemp("player"), STEPS)


def played(
    player: Player, monkeypatch: pytest.MonkeyPatch, liar: str, what: str, rate: float = 1.0
) -> Played:
    planned_in_pairs(monkeypatch, LIES, FIRSTS, LASTS)
    fault = Fault(1.0, math.inf, "lie", (liar,), 0.0, what)
    names = tuple(FIRSTS + LASTS)
    schedule = Schedule(names, (), (fault,), is_audited=True, liars=(liar,), audit_rate=rate)
    return player.play(LIES, schedule)


@pytest.mark.parametrize(
    ("what", "liar", "told"),
    [
        ("held-out", "b", FOUND),
        ("swapped", "e", DOUBTED),
        ("overflow", "b", ""),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("held-out-sent", "a", FOUND),
                ("overflow", "a", ""),
                ("edge-in", "b", DOUBTED),
                ("flip", "a", FOUND),
                ("flip", "d", FOUND),
                ("activation", "a", FOUND),
                ("activation", "b", FOUND),
                ("edge-out", "a", FOUND),
                ("swapped", "f", DOUBTED),
                ("two-faced", "a", "has claimed one thing to some"),
                ("accuse", "a", "otherwise than those who computed it again"),
                ("unshown", "a", ""),
                ("sum", "c", FOUND),
                ("loss", "b", FOUND),
                ("norm", "b", "another norm than its sums come to"),
                ("parameters", "e", "states another digest of layer 0"),
                ("update", "d", "states another digest of layer"),
            )
        ),
    ],
)
def test_who_lies_is_found_and_nothing_of_it_stays(
    player: Player, monkeypatch: pytest.MonkeyPatch, what: str, liar: str, told: str
) -> None:
    """Losses, held-out ones among them, are those of one process."""
    found = played(player, monkeypatch, liar, what)
    assert found.problem == "" and found.lies and not found.stayed
    assert not told or any(told in report for report in found.reports), found.reports


def colluders_play(
    player: Player,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[str, str],
    liars: str,
    what: str = "activation",
    rate: float = 1.0,
) -> Played:
    """Play with colluders. `stages`: the holders of the first and of the second half of the
    model."""
    planned_in_pairs(monkeypatch, LIES, *stages, evens_out=True)
    faults = [Fault(1.0, math.inf, "lie", (it,), 0.0, what) for it in liars]
    schedule = Schedule(
        tuple("".join(stages)),
        (),
        tuple(faults),
        is_audited=True,
        liars=tuple(liars),
        audit_rate=rate,
        lie_together=len(liars) > 1,
    )
    return player.play(LIES, schedule)


@pytest.mark.parametrize("liars", ["ag", *(pytest.param(it, marks=NIGHTLY) for it in COLLUDERS)])
def test_colluders_that_are_half_of_a_stage_do_not_win_it(
    player: Player, monkeypatch: pytest.MonkeyPatch, liars: str
) -> None:
    """Two of four members come to one work and two to another; holders of the other stage are given
    the parameters. Where all links in doubt counted, one side went as a whole. For four of these
    eight pairs it was the honest side, and the losses were others."""
    found = colluders_play(player, monkeypatch, ("aceg", "bdfh"), liars)
    assert found.problem == "" and found.lies and not found.stayed
    assert found.reports and all(FOUND in it for it in found.reports), found.reports


@pytest.mark.parametrize(
    ("stages", "liars", "what"),
    [
        (("ace", "bdf"), "bd", "loss"),
        *(
            pytest.param(*case, marks=NIGHTLY)
            for case in (
                (("ac", "bd"), "a", "activation"),
                (("ac", "bd"), "b", "loss"),
                (("ac", "bd"), "d", "flip"),
                (("ac", "bd"), "c", "edge-out"),
                (("ac", "bd"), "a", "accuse"),
                (("ace", "bdf"), "ac", "activation"),
                (("ace", "bdf"), "ce", "flip"),
                (("ace", "bdf"), "df", "sum"),
            )
        ),
    ],
)
def test_one_of_two_and_two_of_three_holders_are_judged_by_the_other_stage(
    player: Player,
    monkeypatch: pytest.MonkeyPatch,
    stages: tuple[str, str],
    liars: str,
    what: str,
) -> None:
    """Before, chance decided between two holders, and of three the honest one had to go: what liars
    had computed stayed."""
    found = colluders_play(player, monkeypatch, stages, liars, what)
    assert found.problem == "" and found.lies and not found.stayed
    assert any(FOUND in report for report in found.reports), found.reports


@NIGHTLY
def test_where_nobody_has_room_for_another_stage_its_holders_judge_as_they_did(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A holder takes the place of a drawn auditor that cannot judge: the liar is out, and only not
    barred."""
    monkeypatch.setattr(lent_parameters, "free_bytes", lambda device: 0)
    found = colluders_play(player, monkeypatch, ("ace", "bdf"), "a", "flip")
    assert found.problem == "" and found.lies and not found.stayed
    assert found.reports and all(FOUND in it for it in found.reports), found.reports


@pytest.mark.parametrize(
    "what", [pytest.param("held-out", marks=pytest.mark.nightly), "held-out-sent"]
)
def test_after_the_last_step_all_is_computed_again_at_any_rate(
    player: Player, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The final evaluation is the number by which a run is known, and a liar in it has nothing to
    lose."""
    honest = LieInTurn.is_told

    def is_told(self: LieInTurn, step: int) -> bool:
        return step == STEPS and honest(self, step)

    monkeypatch.setattr(LieInTurn, "is_told", is_told)
    liar = "b" if what == "held-out" else "a"
    found = played(player, monkeypatch, liar, what, rate=0.000_001)
    assert found.problem == "" and found.lies
    assert any(FOUND in report for report in found.reports), found.reports


@pytest.mark.nightly
def test_rounded_tensors_are_rounded_alike_by_who_computes_them_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tensors between stages travel in eight bits, drawn by step, layer and microbatch; held-out
    ones as well. Nobody lies, and nobody is blamed."""
    run = make_run(tmp_path, STEPS)
    spec = json.loads(run.read_text())
    spec["codecs"] |= {"activations": ["int8"], "gradients": ["int8"]}
    run.write_text(json.dumps(spec))
    planned_in_pairs(monkeypatch, 1, FIRSTS, LASTS)
    audits = Counter[str]()

    async def scene(swarm: Swarm) -> None:
        peers = await begun(swarm, with_audits(run, 1.0), FIRSTS + LASTS)
        await swarm.until(lambda: has_evaluated(peers[0], STEPS), "the last evaluation", 120)
        for peer in peers:
            assert peer.daemon is not None
            audits[peer.name] = peer.daemon.status_json()["audits"]
            assert len([it for it in peer.events() if it["event"] == "view"]) == 1, "one view"

    blames = Blames()
    with blames.heard():
        play(1, tmp_path / "world", scene)
    blames.require_none()
    twice = 2  # the first step and the held-out one: colluders may have chosen their draws
    assert sum(audits.values()) == (STEPS + 1 + twice) * len(audits)
