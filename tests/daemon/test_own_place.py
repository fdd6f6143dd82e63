"""In a large swarm a peer knows its place, measures some links, and says so in a small record."""

import msgspec

from p2p_dtfm.core.planner.explain import explain
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.facts.brief_links import (
    BEST_LINKS,
    OTHER_LINKS,
    Link,
    measured_links,
)
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import open_record
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, Snapshot
from p2p_dtfm.daemon.peers.facts.estimates_kept import EstimatesKept
from p2p_dtfm.daemon.peers.facts.own_place import OwnPlace
from p2p_dtfm.daemon.peers.self_record import PROBED_PEERS_LIMIT, SelfRecord
from p2p_dtfm.sim.scenario.brief_records import with_brief_records
from tests.core.builders import device
from tests.core.planning import Peer, workload
from tests.core.planning import snapshot as snapshot_of

PEERS = [f"p{n:03d}" for n in range(100)]


def own_record() -> SelfRecord:
    return SelfRecord(Member("me", 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]


def test_nothing_is_said_of_places_in_a_small_swarm() -> None:
    own = own_record()
    own.state_swarm(["me", *PEERS[:20]])
    assert own.place.said() == b""
    own.state_swarm(["me", *PEERS[:40]])
    assert own.place.said() != b""
    record, _ = own.make(lambda payload: b"")
    assert record.brief is msgspec.UNSET


def test_peers_that_answer_one_another_find_their_places() -> None:
    """The peers are on a line, 10 ms apart."""
    places = {name: OwnPlace(name) for name in PEERS[:8]}
    for place in places.values():
        place.is_asked_for = True
    names = list(places)
    for _ in range(60):
        for at, name in enumerate(names):
            other = places[name].next_to_ask(names)
            assert other is not None and other != name
            apart_ns = 10_000_000 * abs(at - names.index(other))
            places[name].hear(other, places[other].said(), apart_ns)
    near = places[names[0]].by_nearness(names[1:])
    assert near[0] in names[1:3] and near[-1] in names[-2:]
    assert places[names[0]].refresh_s > 1


def test_an_answer_that_is_no_place_is_nothing() -> None:
    place = OwnPlace("me")
    before = place.coordinate
    far = msgspec.structs.replace(before, position_us=(1 << 40,) * 8)
    for answer in (b"", b"rubbish", encode(far), encode((1, 2, 3)), b"\xc1" * 300):
        place.hear("other", answer, 1_000_000)
    assert place.coordinate == before


def test_a_record_in_a_large_swarm_names_links_to_who_is_there() -> None:
    own = own_record()
    own._links = {peer: Link(1_000_000, 1_000_000) for peer in ("gone", *PEERS[:80])}
    own.state_swarm(["me", *PEERS])
    record, signed = own.make(lambda payload: b"")
    assert record.links == {} and len(measured_links(record.brief)) == BEST_LINKS + OTHER_LINKS
    assert record.link_to("gone") is None
    assert open_record(signed, "00" * 32, lambda *_: True) == record
    own.state_swarm(["me", *PEERS[:63]])
    record, _ = own.make(lambda payload: b"")
    assert record.brief is msgspec.UNSET and "gone" in record.links


def test_half_of_the_links_that_are_measured_are_near() -> None:
    own = own_record()
    own.state_swarm(["me", *PEERS])
    first = own.unmeasured(PEERS)
    assert len(first) == PROBED_PEERS_LIMIT
    own._links = {peer: Link(1, 1) for peer in first[:32]}
    here = own.place.coordinate
    far = msgspec.structs.replace(here, position_us=(100_000,) * 8)
    for peer in PEERS:
        near = int(peer[1:]) >= 90
        own.place._note(peer, here if near else far)
    then = own.unmeasured(PEERS)
    assert len(then) == 32
    near = {peer for peer in PEERS[90:] if peer not in own._links}
    assert set(then[: len(near)]) == near


def test_the_plan_says_which_links_are_estimates_and_how_far_off_they_were() -> None:
    near, far = Link(2_000_000, 50_000_000), Link(80_000_000, 20_000_000)
    ends = [(a, b) for a in range(8) for b in range(8) if a != b]
    links = {(a, b): near if a % 2 == b % 2 else far for a, b in ends}
    full = snapshot_of([Peer(memory_bytes=2 << 30)] * 8, workload(blocks=12), links=links)
    small = with_brief_records(full, least_members=2)
    told = [
        msgspec.structs.replace(
            record, brief=msgspec.structs.replace(record.brief, measured=record.brief.measured[:24])
        )
        for record in small.records
    ]
    known: Snapshot = msgspec.structs.replace(small, records=tuple(told), previous=GENESIS)
    plan = compute_plan(known)
    assert isinstance(plan, Plan)
    explanation = explain(known, plan)
    assert explanation.links["estimated"] > 0
    assert "links that it sends over: " in explanation.text()
    exact = compute_plan(full)
    assert isinstance(exact, Plan)
    assert explain(full, exact).links.keys() == {"measured"}

    kept = EstimatesKept()
    assert kept.errors is None
    for one in full.records:
        for other, link in one.links.items():
            kept.measured_in(known, one.peer_id, other, link)
    errors = kept.errors
    assert errors is not None and 0 < errors.links < 100
    assert errors.round_trip < 0.5 and errors.rate < 1
