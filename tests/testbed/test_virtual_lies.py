"""Real daemons in virtual time, some of which lie: which are drawn to lie, what the others see, and
what is not promised."""

import math
from pathlib import Path

import pytest

from p2p_dtfm.testbed.virtual.lies.lying import IN_WORDS, IN_WORK, KINDS
from p2p_dtfm.testbed.virtual.planted.bug import Planted, planted
from p2p_dtfm.testbed.virtual.planted.verdicts import VERDICTS
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.player import Player
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LIES, LIES_IN_STAGES
from p2p_dtfm.testbed.virtual.seeds.schedules.liars import BEGUN_IN_STAGES, KINDS_IN_STAGES
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault, Schedule

STEPS = 10


def lies(
    what: str, at_s: float = 1.0, rate: float = 1.0, together: bool = False, begun: str = "abcd"
) -> Schedule:
    """The last quarter of the members lies to the end."""
    liars = tuple(begun[-(len(begun) // 4) :])
    fault = Fault(at_s, math.inf, "lie", liars, 0.0, what)
    return Schedule(
        tuple(begun),
        (),
        (fault,),
        is_audited=True,
        liars=liars,
        lie_together=together,
        audit_rate=rate,
    )


def test_a_quarter_at_most_is_drawn_to_lie_and_all_kinds_are() -> None:
    schedules = [draw(seed) for seed in range(LIES, LIES + 400)]
    assert draw(LIES) == schedules[0] != schedules[1]
    for schedule in schedules:
        told = [fault for fault in schedule.faults if fault.kind == "lie"]
        assert 1 <= len(schedule.liars) <= len(schedule.begun) // 4
        assert {name for fault in told for name in fault.whom} == set(schedule.liars)
        assert schedule.is_audited and not schedule.is_small
        alone = all(len(fault.whom) == 1 for fault in told)
        assert schedule.lie_together or alone, "colluders tell the same, at once"
        assert schedule.only(frozenset()).liars == schedule.liars
    kinds = {fault.what for it in schedules for fault in it.faults if fault.kind == "lie"}
    assert kinds == set(KINDS)
    crashes = [any(f.kind not in ("lie", "join") for f in it.faults) for it in schedules]
    assert crashes == [seed % 2 == 1 or seed % 8 == 4 for seed in range(LIES, LIES + 400)]
    outages = [any(f.kind == "outage" for f in it.faults) for it in schedules]
    assert outages == [seed % 8 == 4 for seed in range(LIES, LIES + 400)]
    assert all(not draw(seed).liars for seed in range(200))


def test_seeds_of_stages_have_one_liar_among_machines_without_room_for_the_model() -> None:
    schedules = [draw(seed) for seed in range(LIES_IN_STAGES, LIES_IN_STAGES + 400)]
    assert {len(it.begun) for it in schedules} == set(BEGUN_IN_STAGES)
    assert all(it.is_small and it.is_audited and len(it.liars) == 1 for it in schedules)
    lies = [fault for it in schedules for fault in it.faults if fault.kind == "lie"]
    assert set(KINDS_IN_STAGES) <= {fault.what for fault in lies}
    for it in schedules:
        named = {name for fault in it.faults for name in fault.whom}
        assert named <= {*it.begun, *it.joiners} and not {*it.begun} & {*it.joiners}
        assert all(fault.whom == it.liars for fault in it.faults if fault.kind == "lie")


@pytest.fixture(scope="module")
def player(tmp_path_factory: pytest.TempPathFactory) -> Player:
    return Player(tmp_path_factory.mktemp("player"), STEPS)


def test_a_liar_is_found_and_the_same_seed_has_the_same_trace_again(player: Player) -> None:
    played = [player.play(LIES, lies("flip")) for _ in range(2)]
    assert [it.problem for it in played] == ["", ""]
    assert played[0].lies > 0 and played[0].stayed == 0
    assert played[0].digest == played[1].digest != ""


@pytest.mark.nightly
def test_seeds_of_stages_hold(player: Player) -> None:
    """Seven members train, of which one lies, with crashes between."""
    found = player.play(LIES_IN_STAGES + 1, draw(LIES_IN_STAGES + 1))
    assert found.problem == "" and found.lies and not found.stayed


def test_evaluation_is_part_of_the_work_that_others_compute_again(tmp_path: Path) -> None:
    """Otherwise all would show the liar's word, as nothing else depends on evaluation. Of four
    replicas two have a part in it, and b is one of them."""
    played = Player(tmp_path, 12).play(LIES, lies("held-out", at_s=3.0, begun="acdb"))
    assert played.problem == "" and played.lies


def bug(name: str) -> Planted:
    return next(it for it in VERDICTS if it.name == name)


@pytest.mark.parametrize(
    ("name", "what", "told"),
    [
        ("every-accusation", "accuse", "an honest peer"),
        ("one-is-enough", "accuse", "an honest peer"),
        ("never-drawn", "flip", "nobody honest was to compute that again"),
        ("audits-unheeded", "zeros", "an honest peer was to compute that again"),
    ],
)
def test_a_bug_in_verdicts_is_found(player: Player, name: str, what: str, told: str) -> None:
    with planted(bug(name)):
        assert told in player.play(LIES, lies(what)).problem


WITHOUT_AUDITS = ("norm", "nan")
"""Finding these needs no work computed again, so they are tried each time. Real liars are tried at
night alone (`tests/e2e/test_liars.py`)."""


@pytest.mark.parametrize(
    "what",
    [pytest.param(it, marks=() if it in WITHOUT_AUDITS else pytest.mark.nightly) for it in KINDS],
)
def test_each_kind_of_lie_is_told_and_none_stays(player: Player, what: str) -> None:
    """Only newcomers are given states, and evidence is asked for where a stage has neighbours."""
    played: Played = player.play(LIES, lies(what))
    assert played.problem == ""
    assert played.lies or what in ("state", "unshown", "slander")
    assert played.stayed == 0
    if what == "norm":
        assert any("another norm than the other holders" in it for it in played.reports)
    assert set(IN_WORK).isdisjoint(IN_WORDS)


@pytest.mark.nightly
def test_what_seeds_have_found_stays_mended(tmp_path: Path) -> None:
    """Two liars of eight gave one honest member at a time another sum than the rest. Of two in
    doubt the one with the higher id went, each time, until the liars were alone. In the other seed
    the member that both contradicted went."""
    player = Player(tmp_path)
    for seed in (200_002, 600_002):
        assert player.play(seed).problem == ""
