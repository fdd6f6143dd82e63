"""Words that come late, while all else goes on and a member dies."""

from dataclasses import replace

from p2p_dtfm.daemon.peers.messenger import DEADLINE_S
from p2p_dtfm.daemon.peers.wire import _KINDS, Knock
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import LATE_WORDS
from p2p_dtfm.testbed.virtual.seeds.schedules.late_words import LATE_S, MESSAGES
from tests.testbed.test_virtual_moments import ACTIVE, KILL, World


def test_from_900000_on_words_are_late_and_machines_only_crash() -> None:
    schedules = [draw(seed) for seed in range(LATE_WORDS, LATE_WORDS + 100)]
    assert {*MESSAGES, "prepared"} <= set(_KINDS)
    assert LATE_S[1] < DEADLINE_S / 2, "nobody gives the call up"
    for it in schedules:
        assert it.has_only_crashes and it.is_calm and it.is_small and it.lanes_are_apart
        assert len(it.faults) >= 12 and all(fault.at_message for fault in it.faults)
    faults = [fault for it in schedules for fault in it.faults]
    late = [fault for fault in faults if fault.late_s]
    assert len(faults) > len(late) > len(faults) / 2
    assert any(it.is_of_third for it in late) and any(not it.is_of_third for it in late)
    assert sum(it.kind == "late word" for it in faults) > len(faults) / 10


def test_a_late_word_is_held_with_what_follows_of_its_kind_on_its_way() -> None:
    world = World("abc")
    world.moments.wait(0, replace(KILL, late_s=2.0, after_s=0.5, is_of_third=True))
    assert world.seconds(Knock("run")) == 0.0, "that is another one"
    assert world.seconds(ACTIVE) == 2.0
    world.now_s += 0.5
    world.go_on()
    assert [fault.whom for fault in world.begun] == [("c",)], "neither end of its way"
    assert world.seconds(ACTIVE) == 1.5, "it leaves with the first one"
    assert world.seconds(ACTIVE, goal="c") == world.seconds(Knock("run")) == 0.0
    world.now_s += 1.5
    assert world.seconds(ACTIVE) == 0.0 and world.moments.is_idle


def test_where_nobody_else_is_left_it_is_done_to_an_end() -> None:
    world = World("ab")
    world.moments.wait(0, replace(KILL, late_s=2.0, is_of_third=True))
    world.seconds(ACTIVE)
    world.go_on()
    assert [fault.whom for fault in world.begun] == [("a",)]
