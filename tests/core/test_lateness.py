"""A peer that runs late itself is patient with others, and no longer once it is punctual again."""

from p2p_dtfm.core.liveness.lateness import ASLEEP_NS, SECOND_NS, Lateness
from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS, Liveness

TICK_NS = SECOND_NS // 10


def with_ticks(apart_ns: int, lateness: Lateness | None = None, from_ns: int = 0) -> Lateness:
    lateness = lateness or Lateness()
    for turn in range(400):
        lateness.ticked(from_ns + turn * apart_ns)
    return lateness


def test_who_is_punctual_waits_no_longer_than_it_was_to() -> None:
    assert with_ticks(TICK_NS).stretched_ns(6 * SECOND_NS, 32) == 6 * SECOND_NS


def test_who_is_late_is_patient_and_the_more_the_more_others_are_there() -> None:
    lateness = with_ticks(SECOND_NS * 8 // 10)
    assert lateness.stretched_ns(6 * SECOND_NS, 8) == 6 * SECOND_NS, "a small swarm"
    assert 11.8 < lateness.stretched_ns(6 * SECOND_NS, 16) / SECOND_NS <= 12
    assert 17.8 < lateness.stretched_ns(6 * SECOND_NS, 32) / SECOND_NS <= 18
    with_ticks(TICK_NS, lateness, 400 * SECOND_NS)
    assert lateness.stretched_ns(6 * SECOND_NS, 32) < 6 * SECOND_NS + SECOND_NS // 100, "over"


def test_patience_has_an_end() -> None:
    assert with_ticks(9 * SECOND_NS).stretched_ns(SECOND_NS, 32) == 4 * SECOND_NS


def test_a_sleep_says_nothing_of_how_late_a_peer_runs() -> None:
    lateness = Lateness()
    lateness.ticked(0)
    lateness.ticked(ASLEEP_NS)
    assert lateness.stretched_ns(SECOND_NS, 32) == SECOND_NS


def silence_noticed_s(tick_ns: int, watched: int) -> float:
    """How long others are silent before a peer with such ticks suspects them."""
    liveness = Liveness(LAN_LIVENESS)
    liveness.watch([f"peer-{number}" for number in range(watched)], 0)
    now_ns = 0
    while not liveness.tick(now_ns):
        now_ns += tick_ns
        assert now_ns < 600 * SECOND_NS, "never"
    return now_ns / SECOND_NS


def test_the_dead_are_noticed_later_by_who_is_late_in_a_crowd_but_noticed() -> None:
    assert silence_noticed_s(TICK_NS, 16) == silence_noticed_s(TICK_NS, 4) < 5.5
    assert silence_noticed_s(SECOND_NS // 2, 4) < silence_noticed_s(SECOND_NS // 2, 16) < 30


def test_who_watches_many_speaks_to_each_less_often() -> None:
    def beats(count: int) -> int:
        liveness = Liveness(LAN_LIVENESS)
        peers = [f"peer-{number}" for number in range(count)]
        liveness.watch(peers, 0)
        due = 0
        for turn in range(1, 121):
            for peer_id in peers:
                liveness.heard(peer_id, turn * TICK_NS)
            liveness.tick(turn * TICK_NS)
            due += len(liveness.due_heartbeats(turn * TICK_NS))
        return due

    assert beats(8) == 2 * beats(4), "each as often"
    assert beats(16) <= beats(8) * 5 // 4, "all together as often"
