"""Who is suspected of being out of reach: silent peers, and those whose connections broke."""

import dataclasses
import itertools
import random

import pytest

from p2p_dtfm.core.liveness.liveness import (
    LAN_LIVENESS,
    WAN_LIVENESS,
    Liveness,
    LivenessTiming,
)
from p2p_dtfm.core.liveness.rhythm import SECOND_NS

TIMING = WAN_LIVENESS
REGULAR = dataclasses.replace(
    LAN_LIVENESS, least_silence_ns=3 * SECOND_NS, calm_silence_ns=3 * SECOND_NS
)


def watching(*peers: str, timing: LivenessTiming = TIMING) -> Liveness:
    liveness = Liveness(timing)
    liveness.watch(peers, 0)
    liveness.tick(0)
    return liveness


def run(liveness: Liveness, from_s: float, to_s: float, talking: tuple[str, ...] = ()) -> list[str]:
    suspected = []
    now_ns = int(from_s * SECOND_NS)
    while now_ns < to_s * SECOND_NS:
        now_ns += SECOND_NS // 4
        for peer in talking:
            liveness.heard(peer, now_ns)
        suspected += [suspicion.peer_id for suspicion in liveness.tick(now_ns)]
    return suspected


def test_silence_is_suspected_once() -> None:
    liveness = watching("a", "b")
    assert run(liveness, 0, 20, talking=("a",)) == ["b"]
    liveness.heard("b", 20 * SECOND_NS)
    assert run(liveness, 20, 30, talking=("a",)) == ["b"], "again after it was heard"


def test_a_broken_stream_is_confirmed_by_silence() -> None:
    liveness = watching("a", "b")
    for peer in ("a", "b"):
        liveness.stream_reset(peer, SECOND_NS)
    liveness.heard("a", SECOND_NS + 1)
    assert run(liveness, 1, 4, talking=("a",)) == ["b"]


def test_a_sleeper_judges_nobody() -> None:
    liveness = watching("a")
    assert run(liveness, 0, 2, talking=("a",)) == []
    assert liveness.tick(60 * SECOND_NS) == []
    assert run(liveness, 60, 63) == []
    assert run(liveness, 63, 70) == ["a"]


def test_heartbeats_are_due_where_nothing_was_said() -> None:
    liveness = watching("a", "b")
    assert liveness.due_heartbeats(2 * SECOND_NS) == ("a", "b")
    liveness.said("a", 3 * SECOND_NS)
    assert liveness.due_heartbeats(3 * SECOND_NS + 1) == ("b",)


def beats(liveness: Liveness, *, to_s: float, every_s: float, from_s: float = 0.0) -> float:
    """`a` is heard at this interval; returns when it was heard last."""
    heard_s, tick_s = from_s, from_s
    while tick_s < to_s:
        tick_s += 0.25
        if tick_s - heard_s >= every_s:
            heard_s = tick_s
            liveness.heard("a", int(heard_s * SECOND_NS))
        assert liveness.tick(int(tick_s * SECOND_NS)) == []
    return heard_s


def missed_after_s(liveness: Liveness, heard_s: float) -> float:
    tick_s = heard_s
    while True:
        tick_s += 0.25
        if liveness.tick(int(tick_s * SECOND_NS)):
            return tick_s - heard_s


def test_who_speaks_regularly_is_missed_soon() -> None:
    liveness = watching("a", timing=REGULAR)
    assert missed_after_s(liveness, beats(liveness, to_s=20, every_s=0.5)) == 3.0


def test_who_is_silent_now_and_then_is_given_longer() -> None:
    liveness = watching("a", timing=REGULAR)
    heard_s = beats(liveness, to_s=10, every_s=0.5)
    heard_s = beats(liveness, from_s=heard_s, to_s=heard_s + 1.25, every_s=1.25)
    heard_s = beats(liveness, from_s=heard_s, to_s=40, every_s=0.5)
    assert missed_after_s(liveness, heard_s) == 3.75, "three times that one silence"


def test_one_long_silence_is_forgotten_after_a_minute() -> None:
    liveness = watching("a", timing=REGULAR)
    heard_s = beats(liveness, to_s=4, every_s=2)
    heard_s = beats(liveness, from_s=heard_s, to_s=120, every_s=0.5)
    assert missed_after_s(liveness, heard_s) == 3.0


def test_of_whom_little_is_known_yet_nothing_is_expected() -> None:
    liveness = watching("a", timing=REGULAR)
    assert missed_after_s(liveness, beats(liveness, to_s=3, every_s=0.5)) == 5.0


def test_no_silence_is_longer_than_the_longest() -> None:
    liveness = watching("a", timing=REGULAR)
    assert missed_after_s(liveness, beats(liveness, to_s=60, every_s=2.5)) == 5.0


def test_who_was_late_itself_does_not_accuse_for_that_time() -> None:
    """This peer's own loop stood still for 1.5 s at a time, less than a sleep. What others said
    meanwhile is still to be read."""
    liveness = watching("a", timing=REGULAR)
    heard_s = beats(liveness, to_s=20, every_s=0.5)
    tick_s = heard_s
    for _ in range(5):
        tick_s += 1.5
        assert liveness.tick(int(tick_s * SECOND_NS)) == [], f"after {tick_s - heard_s} s"
    assert missed_after_s(liveness, tick_s) <= 2.0, "what it did listen counts"


def test_where_nobody_listens_any_more_a_broken_stream_is_enough() -> None:
    liveness = watching("a", "b")
    for peer in ("a", "b"):
        liveness.stream_reset(peer, SECOND_NS)
        assert peer in liveness.due_heartbeats(SECOND_NS), "it is called at once"
    liveness.stream_reset("b", SECOND_NS, is_refused=True)
    assert run(liveness, 1, 1.75) == ["b"]
    liveness.heard("b", 2 * SECOND_NS)
    liveness.heard("a", 2 * SECOND_NS)
    assert run(liveness, 2, 4) == [], "they are back"


def in_calm_times(timing: LivenessTiming) -> tuple[Liveness, float]:
    liveness = watching(*ALL, timing=timing)
    run(liveness, 0, 30, talking=ALL)
    return liveness, 30.0


@pytest.mark.parametrize("timing", [LAN_LIVENESS, WAN_LIVENESS], ids=["lan", "wan"])
def test_where_a_relay_was_between_another_way_may_be_found_first(timing: LivenessTiming) -> None:
    """Under a load of 14 a redial over the second relay took 2.05 s. The peer with the greater id
    also lets the other one call first. Members without a relay between them hear the peer all the
    while."""
    liveness, at_s = in_calm_times(timing)
    liveness.stream_reset("b", int(at_s * SECOND_NS), is_rerouted=True)
    assert "b" in liveness.due_heartbeats(int(at_s * SECOND_NS)), "it is called at once"
    patience_s = timing.least_silence_ns / SECOND_NS
    while at_s < 30 + patience_s - 0.25:
        at_s += 0.25
        tell(liveness, at_s, {"b": 0}, "a", "c")
        assert run(liveness, at_s - 0.25, at_s, talking=("a", "c")) == [], f"after {at_s - 30} s"
    assert run(liveness, at_s, at_s + 1, talking=("a", "c")) == ["b"]


@pytest.mark.parametrize("timing", [LAN_LIVENESS, WAN_LIVENESS], ids=["lan", "wan"])
def test_whom_the_second_relay_cannot_reach_either_is_missed_as_soon_as_ever(
    timing: LivenessTiming,
) -> None:
    liveness, at_s = in_calm_times(timing)
    liveness.stream_reset("b", int(at_s * SECOND_NS), is_rerouted=True)
    run(liveness, at_s, at_s + 0.25, talking=("a", "c"))
    liveness.stream_reset("b", int((at_s + 0.25) * SECOND_NS))
    until_s = at_s + timing.reset_ns / SECOND_NS
    assert run(liveness, at_s + 0.25, until_s, talking=("a", "c")) == ["b"]


def test_who_is_heard_over_another_way_is_watched_as_before() -> None:
    liveness, at_s = in_calm_times(LAN_LIVENESS)
    liveness.stream_reset("b", int(at_s * SECOND_NS), is_rerouted=True)
    run(liveness, at_s, at_s + 1, talking=ALL)
    liveness.stream_reset("b", int((at_s + 1) * SECOND_NS))
    assert run(liveness, at_s + 1, at_s + 1.75, talking=("a", "c")) == ["b"]


def test_who_is_to_hear_something_is_called_at_once() -> None:
    liveness = watching("a", timing=REGULAR)
    heard_s = beats(liveness, to_s=20, every_s=0.5)
    now_ns = int(heard_s * SECOND_NS)
    liveness.watch(["a", "b"], now_ns)
    liveness.due_heartbeats(now_ns)
    liveness.speak_to(["a", "b", "stranger"])
    assert liveness.due_heartbeats(now_ns + 1) == ("a", "b"), "though none is due"
    assert liveness.due_heartbeats(now_ns + 2) == ()
    assert run(liveness, heard_s, heard_s + 2.75) == [], "another's word makes no silence longer"


ALL = ("a", "b", "c")


def near(*peers: str) -> Liveness:
    return watching(*peers, timing=LAN_LIVENESS)


def tell(liveness: Liveness, at_s: float, silent_ms: dict[str, int], *tellers: str) -> None:
    for teller in tellers:
        liveness.fellow_says(teller, (), silent_ms, int(at_s * SECOND_NS))


def test_whom_others_hear_is_cut_off_and_soon_known_to_be() -> None:
    liveness = near("b", "c", "d")
    assert run(liveness, 0, 1.5, talking=("c", "d")) == []
    assert liveness.missed() == ("b",), "so the others are asked"
    assert liveness.due_heartbeats(int(1.5 * SECOND_NS)) == ("b", "c", "d"), "at once"
    tell(liveness, 1.5, {"b": 0}, "c")
    assert run(liveness, 1.5, 2, talking=("c", "d")) == [], "one may lie"
    tell(liveness, 2, {"b": 500}, "d")
    assert run(liveness, 2, 2.5, talking=("c", "d")) == ["b"]


def test_who_stands_still_is_silent_for_all_and_given_its_time() -> None:
    liveness = near("b", "c", "d")
    for half_seconds in range(1, 8):
        at_s = half_seconds / 2
        assert run(liveness, at_s - 0.5, at_s, talking=("c", "d")) == []
        # the others heard the peer a little later than this peer did, and never since
        tell(liveness, at_s, {"b": max(0, half_seconds * 500 - 1000)}, "c", "d")


def test_of_two_others_the_one_is_believed() -> None:
    liveness = near("b", "c")
    run(liveness, 0, 2, talking=("c",))
    tell(liveness, 2, {"b": 0}, "c")
    assert run(liveness, 2, 2.5, talking=("c",)) == ["b"]


def test_a_fellow_that_misses_somebody_is_answered_at_once() -> None:
    liveness = near("b", "c")
    run(liveness, 0, 1, talking=("b",))
    liveness.due_heartbeats(SECOND_NS)
    liveness.fellow_says("c", ("b", "stranger"), {}, SECOND_NS + 1)
    assert liveness.due_heartbeats(SECOND_NS + 2) == ("c",)
    liveness.tick(SECOND_NS * 5 // 4)
    assert liveness.silent_ms(SECOND_NS * 5 // 4) == {"b": 250}
    liveness.fellow_says("c", ("b",), {}, SECOND_NS * 5 // 4)
    due = liveness.due_heartbeats(SECOND_NS * 5 // 4)
    assert due == (), "it was answered a moment ago"
    liveness.fellow_says("c", ("b",), {}, SECOND_NS * 4 // 3)
    assert liveness.due_heartbeats(SECOND_NS * 4 // 3) == ("c",), "and now it was not"
    assert liveness.silent_ms(5 * SECOND_NS) == {}, "nobody asks any more"


def test_who_is_not_watched_has_no_say() -> None:
    liveness = near("b", "c")
    run(liveness, 0, 2, talking=("c",))
    tell(liveness, 2, {"b": 0}, "stranger")
    assert run(liveness, 2, 3, talking=("c",)) == []


def test_between_networks_only_silence_counts() -> None:
    liveness = watching("b", "c")
    run(liveness, 0, 3, talking=("c",))
    assert liveness.missed() == ()
    tell(liveness, 3, {"b": 0}, "c")
    assert run(liveness, 3, 4.5, talking=("c",)) == []


def test_what_is_read_late_was_said_at_no_known_time() -> None:
    """A peer that stood still finds old messages when it goes on. It does not say that it hears
    their senders now."""
    liveness = near("b", "c")
    run(liveness, 0, 1, talking=("b", "c"))
    liveness.fellow_says("c", ("b",), {}, 3 * SECOND_NS)
    for read_ns in (3 * SECOND_NS, 3 * SECOND_NS + 2):
        liveness.heard("b", read_ns)
        assert liveness.silent_ms(read_ns) == {}, "before its tick, and just after"
        liveness.tick(3 * SECOND_NS + 1)
    liveness.heard("b", 3 * SECOND_NS + SECOND_NS // 4 + 1)
    assert liveness.silent_ms(3 * SECOND_NS + SECOND_NS // 4 + 1) == {"b": 0}


def silent_together_s(liveness: Liveness, from_s: float, heard_by_c_s: float = 0.0) -> float:
    """As below, but the others, when asked, say that they do not hear `b` either. `c` heard it last
    so many seconds after this peer did."""
    at_s = from_s
    while at_s < from_s + 10:
        at_s += 0.25
        for peer in ("a", "c"):
            liveness.heard(peer, int(at_s * SECOND_NS))
            if "b" in liveness.missed():
                late_s = heard_by_c_s if peer == "c" else 0.0
                silent_ms = max(0, int((at_s - from_s - late_s) * 1000))
                liveness.fellow_says(peer, (), {"b": silent_ms}, int(at_s * SECOND_NS))
        if any(it.peer_id == "b" for it in liveness.tick(int(at_s * SECOND_NS))):
            return at_s - from_s
    raise AssertionError("never")


def regular(*, known_s: int = 30) -> Liveness:
    liveness = near(*ALL)
    run(liveness, 0, 30, talking=ALL)
    liveness.watch(("a", "c"), 30 * SECOND_NS)
    run(liveness, 30, 50 - known_s, talking=("a", "c"))
    liveness.watch(ALL, (50 - known_s) * SECOND_NS)
    run(liveness, 50 - known_s, 50, talking=ALL)
    return liveness


def test_whom_nobody_hears_is_missed_sooner_in_calm_times() -> None:
    assert silent_together_s(regular(known_s=20), 50) == 2.0


def test_who_fell_silent_with_another_is_missed_with_it() -> None:
    """In a partition the suspicion of one peer is no reason for the silence of the others."""
    names = ("b", "c", "d", "e")
    liveness, at_s, suspected = near(*names), 30.0, dict[str, float]()
    run(liveness, 0, at_s, talking=names)
    liveness.heard("c", int(30.2 * SECOND_NS))
    while at_s < 33:
        at_s += 0.25
        for peer in ("d", "e"):
            liveness.heard(peer, int(at_s * SECOND_NS))
            silent_ms = dict.fromkeys(liveness.missed(), int((at_s - 30) * 1000))
            tell(liveness, at_s, silent_ms, peer)
        found = liveness.tick(int(at_s * SECOND_NS))
        suspected |= {suspicion.peer_id: at_s for suspicion in found}
    assert suspected == {"b": 32.0, "c": 32.25}


def test_since_the_last_one_heard_it_counts() -> None:
    assert silent_together_s(regular(known_s=20), 50, heard_by_c_s=0.25) == 2.25


def test_the_shorter_a_peer_is_there_the_longer_it_is_given() -> None:
    """A peer that came half of the time of calm ago is given half of what is added."""
    assert silent_together_s(regular(known_s=4), 50) == 4, "as by silence alone"
    times_s = [silent_together_s(regular(known_s=known_s), 50) for known_s in (8, 14, 17)]
    assert 4 > times_s[0] > times_s[1] > times_s[2] > 2


@pytest.mark.parametrize(("late_s", "noticed_s"), [(0.25, 2.75), (0.5, 3.5), (1.5, 4.0)])
def test_the_later_this_peer_itself_was_the_longer_it_waits(
    late_s: float, noticed_s: float
) -> None:
    liveness = regular(known_s=20)
    late_ns = LAN_LIVENESS.punctual_ns + int(late_s * SECOND_NS)
    for peer in ALL:
        liveness.heard(peer, 50 * SECOND_NS + late_ns)
    liveness.tick(50 * SECOND_NS + late_ns)
    from_s = 50.5 + late_s
    run(liveness, from_s - 0.25, from_s, talking=ALL)
    assert silent_together_s(liveness, from_s) == noticed_s


def test_who_is_late_for_others_too_is_given_three_times_its_longest_silence() -> None:
    liveness = regular(known_s=20)
    run(liveness, 50, 51, talking=("a", "c"))
    run(liveness, 51, 70, talking=ALL)
    assert silent_together_s(liveness, 70) == 3.75


def test_without_fresh_words_of_half_of_the_others_silence_alone_counts() -> None:
    def noticed_s(*tellers: str) -> float:
        names = ("b", "c", "d", "e", "f")
        liveness, at_s = near(*names), 30.0
        run(liveness, 0, at_s, talking=names)
        while not liveness.tick(int(at_s * SECOND_NS)):
            at_s += 0.25
            for peer in names[1:]:
                liveness.heard(peer, int(at_s * SECOND_NS))
            silent_ms = {"b": int((at_s - 30) * 1000)}
            tell(liveness, at_s, silent_ms if "b" in liveness.missed() else {}, *tellers)
        return at_s - 30

    assert noticed_s("c", "d") == 2.0
    assert noticed_s("c") == 2.5, "of four others one is too few"
    assert noticed_s() == 2.5


def test_all_are_asked_again_just_before_their_silence_counts() -> None:
    liveness = near(*ALL)
    run(liveness, 0, 30, talking=ALL)
    run(liveness, 30, 31, talking=("a", "c"))
    assert liveness.due_heartbeats(31 * SECOND_NS) == ALL
    assert liveness.due_ns(31 * SECOND_NS) == 30 * SECOND_NS + SECOND_NS * 17 // 10
    run(liveness, 31, 31.5, talking=("a", "c"))
    liveness.due_heartbeats(31 * SECOND_NS + SECOND_NS // 2)
    at_ns = 30 * SECOND_NS + SECOND_NS * 17 // 10
    assert liveness.tick_early(at_ns) == []
    assert liveness.due_heartbeats(at_ns) == ("a", "c")
    tell(liveness, 31.75, {"b": 1750}, "a", "c")
    assert liveness.due_ns(31 * SECOND_NS + SECOND_NS * 3 // 4) == 32 * SECOND_NS


def test_between_networks_others_silence_is_no_evidence() -> None:
    liveness = watching(*ALL)
    run(liveness, 0, 50, talking=ALL)
    assert silent_together_s(liveness, 50) == 5


def test_what_falls_due_between_ticks_is_judged_then() -> None:
    liveness = near("a", "b")
    liveness.tick(SECOND_NS)
    for peer in ("a", "b"):
        liveness.heard(peer, SECOND_NS)
    liveness.due_heartbeats(SECOND_NS)
    assert liveness.due_ns(SECOND_NS) == 2 * SECOND_NS, "when fellows are asked of who is missed"
    broken_ns = SECOND_NS + 1
    liveness.stream_reset("b", broken_ns)
    assert liveness.due_ns(broken_ns) == broken_ns, "it is called at once"
    assert liveness.due_heartbeats(broken_ns) == ("b",)
    assert liveness.due_ns(broken_ns) == broken_ns + LAN_LIVENESS.reset_ns
    liveness.stream_reset("b", broken_ns + 5, is_refused=True)
    due_ns = broken_ns + LAN_LIVENESS.refused_ns
    assert liveness.due_ns(broken_ns + 5) == due_ns
    assert liveness.tick_early(due_ns - 1) == []
    assert [suspicion.peer_id for suspicion in liveness.tick_early(due_ns)] == ["b"]
    assert liveness.due_ns(due_ns) == 2 * SECOND_NS, "nothing more of who is suspected"


def test_who_is_late_judges_nobody_before_its_tick() -> None:
    liveness = near("a")
    liveness.tick(SECOND_NS)
    liveness.stream_reset("a", SECOND_NS, is_refused=True)
    late_ns = SECOND_NS + LAN_LIVENESS.punctual_ns + 1
    assert liveness.tick_early(late_ns) == []
    assert [suspicion.peer_id for suspicion in liveness.tick(late_ns)] == ["a"]


def silence_noticed_s(liveness: Liveness, from_s: float) -> float:
    """How many seconds after the last word of `b` it is suspected, while the others go on
    speaking."""
    at_s = from_s
    while "b" not in run(liveness, at_s, at_s + 0.25, talking=("a", "c")):
        at_s += 0.25
        assert at_s < from_s + 10
    return at_s + 0.25 - from_s


def test_in_calm_times_a_regular_peer_is_missed_sooner() -> None:
    liveness = near(*ALL)
    run(liveness, 0, 30, talking=ALL)
    assert silence_noticed_s(liveness, 30) == 2.5


def test_who_has_not_been_heard_for_long_is_given_its_time() -> None:
    liveness = near(*ALL)
    run(liveness, 0, 15, talking=ALL)
    assert silence_noticed_s(liveness, 15) == 4


def test_after_somebody_went_times_are_not_calm() -> None:
    liveness = near(*ALL, "d")
    run(liveness, 0, 30, talking=(*ALL, "d"))
    liveness.watch(ALL, 30 * SECOND_NS)
    assert silence_noticed_s(liveness, 30) == 4


def test_after_this_peer_was_late_times_are_not_calm() -> None:
    liveness = near(*ALL)
    run(liveness, 0, 30, talking=ALL)
    run(liveness, 30.5, 31, talking=ALL)  # nothing happened in half a second
    assert silence_noticed_s(liveness, 31) == 4


@pytest.mark.parametrize("reads_first", [True, False])
def test_this_peers_own_standstill_is_no_silence_of_the_others(reads_first: bool) -> None:
    """Of a process that goes on sockets are read before timers fire. For a minute all others were
    missed later, as if they had been silent for so long."""
    liveness, read_ns = near(*ALL), 32 * SECOND_NS
    run(liveness, 0, 30, talking=ALL)
    for reads in (reads_first, not reads_first):
        if reads:
            for peer in ALL:
                liveness.heard(peer, read_ns)
        else:
            assert liveness.tick(read_ns) == []
    run(liveness, 32, 50, talking=ALL)
    assert silence_noticed_s(liveness, 50) == 2.5


def test_who_is_silent_now_and_then_is_given_longer_in_calm_times_too() -> None:
    liveness = near(*ALL)
    run(liveness, 0, 30, talking=ALL)
    run(liveness, 30, 31, talking=("a", "c"))
    run(liveness, 31, 50, talking=ALL)
    assert silence_noticed_s(liveness, 50) == 3.75


def test_judging_early_is_no_tick() -> None:
    """The mean lateness of a loop counts regular ticks only."""
    early, regular = (near(*(f"p{i}" for i in range(12))) for _ in range(2))
    for second in range(1, 40):
        for liveness in (early, regular):
            liveness.tick(second * SECOND_NS)
            for peer in range(1, 12):
                liveness.heard(f"p{peer}", second * SECOND_NS)
        for part in range(1, 10):
            early.tick_early(second * SECOND_NS + part * SECOND_NS // 50)
    assert early.due_ns(40 * SECOND_NS) == regular.due_ns(40 * SECOND_NS)
    assert early.tick(45 * SECOND_NS) == regular.tick(45 * SECOND_NS)


@pytest.mark.parametrize(
    ("fellows", "apart_s", "silent_s"),
    [(1, 0.5, 5), (8, 0.5, 5), (16, 1.0, 5), (24, 1.5, 7.5), (32, 2.0, 10), (1023, 2.0, 10)],
)
def test_who_has_many_fellows_says_less_to_each_and_waits_longer(
    fellows: int, apart_s: float, silent_s: float
) -> None:
    """In swarms of 32 each peer would otherwise do nothing but say that it lives. A broken
    connection is known at once."""
    liveness = Liveness(LAN_LIVENESS)
    said_s, missed_s = [], 0.0
    for tick in range(150):
        now_ns = tick * SECOND_NS // 10
        liveness.watch(["a"], now_ns, fellows)
        if not missed_s and liveness.tick(now_ns):
            missed_s = now_ns / SECOND_NS
        if "a" in liveness.due_heartbeats(now_ns):
            said_s.append(now_ns / SECOND_NS)
    assert missed_s == pytest.approx(silent_s, abs=0.2)
    usual = [b - a for a, b in itertools.pairwise(said_s) if a >= 12]
    assert usual and usual == pytest.approx([apart_s] * len(usual), abs=0.11)
    other = Liveness(LAN_LIVENESS)
    other.watch(["a"], 0, fellows)
    other.stream_reset("a", 0, is_refused=True)
    assert other.tick(SECOND_NS // 10), "nobody listens there"


@pytest.mark.parametrize("timing", [LAN_LIVENESS, WAN_LIVENESS, REGULAR])
@pytest.mark.parametrize("seed", range(8))
def test_a_silence_that_is_evidence_of_nothing_is_no_other_than_if_it_were_looked_into(
    timing: LivenessTiming, seed: int
) -> None:
    """This holds whatever is heard, broken, late or told by others."""
    careful = dataclasses.replace(timing)
    careful.__dict__["innocent_ns"] = 0
    draws, names = random.Random(seed), tuple("abcde")
    pair = Liveness(timing), Liveness(careful)
    fellows, now_ns, seen = (4, 4, 12, 40)[seed % 4], 0, list[object]()
    for _ in range(700):
        now_ns += draws.choices((10, 100, 700), (10, 89, 1))[0] * SECOND_NS // 1000
        name, another, other = draws.sample(names, 3)
        what, silent_ms = draws.random(), draws.choice((0, 200, 4000))
        told = []
        for liveness in pair:
            liveness.watch(names, now_ns, fellows)
            for each in names[: 1 + int(what * 4.2)]:
                liveness.heard(each, now_ns)
            if what < 0.1:
                liveness.stream_reset(name, now_ns, what < 0.05, what > 0.08)
            for teller in (name, another) if what < 0.6 else ():
                liveness.fellow_says(teller, (other,), {other: silent_ms}, now_ns)
            early = liveness.tick_early(now_ns) if what < 0.3 else liveness.tick(now_ns)
            told.append((early, liveness.due_ns(now_ns), liveness.due_heartbeats(now_ns)))
        assert told[0] == told[1], now_ns
        seen += told[0][0]
    assert seen, "somebody is suspected"
