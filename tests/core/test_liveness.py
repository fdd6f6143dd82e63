"""Who is suspected of being out of reach: the silent and the broken."""

from p2p_dtfm.core.liveness.liveness import SECOND_NS, WAN_LIVENESS, Liveness

TIMING = WAN_LIVENESS


def watching(*peers: str) -> Liveness:
    liveness = Liveness(TIMING)
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
