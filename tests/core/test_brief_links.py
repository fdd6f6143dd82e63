"""A record of a large swarm stays small, and the links that it does not name are estimated."""

import math
import statistics
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.cost_model.links.coordinates import ORIGIN, Vivaldi, round_trip_us
from p2p_dtfm.core.cost_model.links.swarm_links import (
    UNKNOWN_BYTES_PER_S,
    UNKNOWN_ROUND_TRIP_NS,
    Source,
    SwarmLinks,
)
from p2p_dtfm.core.cost_model.unmeasured import held_back
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.facts.brief_links import (
    BEST_LINKS,
    BRIEF_LINKS_LIMIT,
    OTHER_LINKS,
    RATES_BYTES_PER_S,
    ROUND_TRIPS_NS,
    STEP_ERROR,
    BriefLinks,
    Coordinate,
    Link,
    brief,
    measured_links,
    short_name,
    step_of,
)
from p2p_dtfm.core.protocol.measured_plans import STAGES_LIMIT, MeasuredPlan
from p2p_dtfm.core.protocol.records import PeerRecord, open_record, packed, sign_record
from p2p_dtfm.net.contacts.identity import Identity, verify
from p2p_dtfm.sim.scenario.brief_records import with_brief_records
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.sim.scenario.scenario import load_scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import scenario_snapshot
from tests.core.builders import record, run_spec
from tests.core.planning import Peer
from tests.core.planning import snapshot as snapshot_of

RUN = run_spec().digest()
alice = Identity(Ed25519PrivateKey.generate())


def peer_id(number: int) -> str:
    return f"12D3KooW{number:044d}"


def many_links(count: int = 1023) -> dict[str, Link]:
    return {
        peer_id(n): Link(1_000_000 + 300_000 * n, 400_000_000 // (1 + n % 97)) for n in range(count)
    }


def test_steps_are_as_near_as_they_say() -> None:
    for scale in (ROUND_TRIPS_NS, RATES_BYTES_PER_S):
        assert list(scale) == sorted(set(scale)) and len(scale) == 256
        value = scale[0]
        while value < scale[-1]:
            assert abs(scale[step_of(value, scale)] - value) <= STEP_ERROR * value + 1
            value += value // 37 + 1
        assert (step_of(0, scale), step_of(1 << 59, scale)) == (0, 255)


def test_the_best_links_and_others_by_chance_that_stays() -> None:
    links = many_links()
    told = brief("me", links, ORIGIN)
    names = measured_links(told)
    assert len(names) == BEST_LINKS + OTHER_LINKS
    nearest = sorted(links, key=lambda it: links[it].round_trip_ns + 2**50 // links[it].bytes_per_s)
    assert all(short_name(it) in names for it in nearest[:4])
    assert brief("me", dict(reversed(links.items())), ORIGIN) == told
    assert brief("another", links, ORIGIN) != told


def small_record(**changes: object) -> PeerRecord:
    far = msgspec.structs.replace(
        ORIGIN, position_us=(-100_000,) * 8, height_us=20_000, error_ppm=150_000
    )
    told = brief(alice.peer_id, many_links(), far)
    return record(alice.peer_id, **({"brief": told} | changes))  # type: ignore[arg-type]


def test_a_record_among_1024_is_below_a_kibibyte() -> None:
    """The record holds two addresses of an ordinary home. Whatever else it tells, it stays below 4
    KiB."""
    at = (
        f"/ip4/203.0.113.77/tcp/41234/p2p/{alice.peer_id}",
        f"/ip4/192.168.178.201/tcp/41234/p2p/{alice.peer_id}",
    )
    signed = sign_record(small_record(addresses=at), alice.sign)
    assert len(encode(signed)) < 1024 + 200, len(encode(signed))
    shape = ((tuple(map(peer_id, range(STAGES_LIMIT))), tuple(range(STAGES_LIMIT + 1))),)
    measured = (MeasuredPlan(shape, 1 << 40),)
    most = small_record(addresses=at * 2, measured=measured, name="é" * 20)
    assert len(encode(sign_record(most, alice.sign))) < 4096


def test_a_record_is_opened_as_it_was_signed_and_knows_its_links() -> None:
    made = small_record()
    opened = open_record(sign_record(made, alice.sign), RUN, verify)
    assert opened == made
    link = opened.link_to(peer_id(0))
    assert link is not None
    assert link.round_trip_ns == pytest.approx(1_000_000, rel=STEP_ERROR)
    assert opened.link_to("nobody") is None
    assert len(measured_links(opened.brief)) == BEST_LINKS + OTHER_LINKS


ROW = b"abcdef\x01\x02"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"links": many_links(1)}, "told twice"),
        ({"brief": BriefLinks(ORIGIN, ROW[:-1])}, "7 bytes"),
        ({"brief": BriefLinks(ORIGIN, ROW * 2)}, "order"),
        (
            {"brief": BriefLinks(ORIGIN, b"".join(bytes([n]) * 8 for n in range(65)))},
            f"{8 * BRIEF_LINKS_LIMIT + 8} bytes",
        ),
        ({"brief": BriefLinks(msgspec.structs.replace(ORIGIN, position_us=(1,)), b"")}, "1 dim"),
        (
            {"brief": BriefLinks(msgspec.structs.replace(ORIGIN, position_us=(1 << 32,) * 8), b"")},
            "far away",
        ),
        ({"brief": BriefLinks(msgspec.structs.replace(ORIGIN, height_us=-1), b"")}, "height"),
    ],
    ids=lambda it: it if isinstance(it, str) else "",
)
def test_what_cannot_be_is_refused(changes: dict[str, object], why: str) -> None:
    signed = sign_record(small_record(**changes), alice.sign)
    with pytest.raises(PeerFault, match=why):
        open_record(signed, RUN, verify)


def test_places_are_found_from_round_trips_alone() -> None:
    """Twelve peers in a plane, each with a line of its own to it."""
    here = {f"p{n}": (n % 4 * 30_000, n // 4 * 45_000, 2_000 * (1 + n % 3)) for n in range(12)}

    def true_us(one: str, other: str) -> float:
        (x, y, up), (z, w, other_up) = here[one], here[other]
        return float(((x - z) ** 2 + (y - w) ** 2) ** 0.5 + up + other_up)

    peers = {name: Vivaldi(name) for name in here}
    pairs = [(one, other) for one in here for other in here if one != other]
    for _ in range(60):
        for one, other in pairs:
            peers[one].observe(peers[other].coordinate, int(true_us(one, other) * 1000))
    off = [
        abs(round_trip_us(peers[one].coordinate, peers[other].coordinate) / true_us(one, other) - 1)
        for one, other in pairs
    ]
    assert statistics.median(off) < 0.05 and max(off) < 0.4
    assert all(peer.coordinate.error_ppm < 200_000 for peer in peers.values())


def test_a_liars_place_moves_nobody_beyond_what_can_be_said() -> None:
    peer = Vivaldi("honest")
    absurd = msgspec.structs.replace(
        ORIGIN, position_us=((1 << 32) - 1,) * 8, height_us=(1 << 32) - 1, error_ppm=0
    )
    for _ in range(200):
        peer.observe(absurd, 1)
    told = BriefLinks(peer.coordinate, b"")
    open_record(sign_record(small_record(brief=told), alice.sign), RUN, verify)


@pytest.mark.parametrize("height_us", [10, (1 << 32) - 1])
@pytest.mark.parametrize("sides", [(1,), (1, -1)])
def test_a_liar_that_says_it_is_far_away_leaves_the_others_where_they_are(
    height_us: int, sides: tuple[int, ...]
) -> None:
    """One liar of forty had all others an hour away from one another, and made their links worth
    nothing."""
    here = [(n % 7 * 20_000, n // 7 * 15_000) for n in range(40)]
    peers = [Vivaldi(f"p{n}") for n in range(40)]
    for turn in range(300):
        at = sides[turn % len(sides)] * ((1 << 32) - 1)
        lie = Coordinate((at,) * 8, height_us, 0)
        for one in range(1, 40):
            other = (one + turn) % 40
            if other != one:
                said = lie if other == 0 else peers[other].coordinate
                peers[one].observe(said, int(2e6 + 1e3 * math.dist(here[one], here[other])))
    off = [
        abs(round_trip_us(peers[one].coordinate, peers[other].coordinate) / true_us - 1)
        for one in range(1, 40)
        for other in range(1, one)
        for true_us in (2e3 + math.dist(here[one], here[other]),)
    ]
    assert statistics.median(off) < 0.1


def test_links_around_the_world_are_estimated_from_some_of_them(tmp_path: Path) -> None:
    text = Path("configs/scenarios/paper-5-world-wide.toml").read_text()
    path = tmp_path / "more.toml"
    path.write_text(text.replace("count = 8", "count = 16"))
    full = scenario_snapshot(load_scenario(path), read_run_spec("gpt3-xl", 24, 1024))
    small = with_brief_records(full)
    assert max(len(encode(packed(each))) for each in small.records) < 480
    known, true = SwarmLinks(small.records), SwarmLinks(full.records)
    counts = known.counts()
    assert counts[Source.GUESSED] == 0
    assert counts[Source.MEASURED] == 128 * (BEST_LINKS + OTHER_LINKS)
    off: list[tuple[float, float]] = []
    for one, told in zip(full.records, small.records, strict=True):
        for other, other_told in zip(full.records, small.records, strict=True):
            if one is other or known.source(one.peer_id, other.peer_id) is not Source.ESTIMATED:
                continue
            way, estimate = true.way(one, other), known.way(told, other_told)
            off.append((abs(estimate[0] / way[0] - 1), abs(estimate[1] / way[1] - 1)))
    assert len(off) > 5000
    assert statistics.median(trip for trip, _ in off) < 0.06
    assert statistics.median(rate for _, rate in off) < 0.06
    assert statistics.quantiles([trip for trip, _ in off], n=10)[-1] < 0.25


def test_up_to_64_members_name_all_links_exactly() -> None:
    few = snapshot_of([Peer()] * 64)
    assert with_brief_records(few) is few
    many = snapshot_of([Peer()] * 65)
    assert all(each.brief is not msgspec.UNSET for each in with_brief_records(many).records)


def test_two_members_that_share_a_short_name_are_taken_for_unmeasured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = with_brief_records(snapshot_of([Peer()] * 4), least_members=2)
    known = SwarmLinks(small.records)
    assert set(known.counts()) == {Source.MEASURED}
    alike = {each.peer_id: short_name(each.peer_id) for each in small.records}
    alike[small.records[1].peer_id] = alike[small.records[0].peer_id]
    monkeypatch.setattr(
        "p2p_dtfm.core.cost_model.links.member_links.short_name", lambda name: alike[name]
    )
    doubtful = SwarmLinks(small.records)
    ids = [each.peer_id for each in small.records]
    assert doubtful.source(ids[2], ids[0]) is Source.REVERSED
    assert doubtful.source(ids[0], ids[1]) is Source.ESTIMATED


def test_nobody_is_held_back_for_links_that_nobody_measures() -> None:
    """A newcomer of a large swarm has measured only some of its members, few of which hold
    stages."""
    small = with_brief_records(snapshot_of([Peer()] * 66))
    plan = compute_plan(snapshot_of([Peer()] * 10))
    joined = msgspec.structs.replace(small, present=plan)
    assert held_back(joined) == frozenset()
    blank = msgspec.structs.replace(small.records[-1], brief=BriefLinks(ORIGIN, b""))
    joined = msgspec.structs.replace(joined, records=(*small.records[:-1], blank))
    assert held_back(joined) == {blank.peer_id}


def test_without_a_place_or_any_rate_a_link_is_guessed() -> None:
    one = msgspec.structs.replace(record("a"), brief=BriefLinks(ORIGIN, b""))
    for other in (record("b"), msgspec.structs.replace(record("b"), brief=one.brief)):
        links = SwarmLinks((one, other))
        assert links.way(one, other) == (UNKNOWN_ROUND_TRIP_NS, UNKNOWN_BYTES_PER_S)
        assert links.source("a", "b") is Source.GUESSED
