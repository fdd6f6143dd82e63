"""A peer's conclusions about its way in, and when a link counts as another one."""

import asyncio
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.protocol.records import Link, Reachability
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.node.background import presence
from p2p_dtfm.daemon.node.background.record_keeping import RecordKeeping
from p2p_dtfm.daemon.node.status_api import StatusApi, way_words
from p2p_dtfm.daemon.peers import reachability, self_record
from p2p_dtfm.daemon.peers.reachability import (
    ASKED_LIMIT,
    ReachabilityFinding,
    ReachabilityService,
    _Reservation,
    meeting_points,
    opening_fix,
)
from p2p_dtfm.daemon.peers.self_record import PROBE_AGAIN_S, PROBE_ROUNDS, SelfRecord
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.nat.dial_back import SeenAddress
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkListeners
from p2p_dtfm.ports import now
from tests.core.builders import device
from tests.core.builders import record as record_of

FIRST = "12D3KooWRbpEJ767DUrmMgm1PApxQQP6RGu8ZLY4XCYqd54AiwbL"
SECOND = "12D3KooWNnjQLdfqu9rfhd8Qr5UyzKEDCfA73AeW6CaX4B2xCrxa"
RELAY = "12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp"
RELAYED = f"/ip4/5.9.0.1/tcp/31331/p2p/{FIRST}/p2p-circuit"


def test_of_a_relayed_address_the_relay_is_asked() -> None:
    direct = f"/ip4/5.9.0.2/tcp/4001/p2p/{SECOND}"
    assert meeting_points([f"{RELAYED}/p2p/{SECOND}"]) == [(FIRST, "/ip4/5.9.0.1/tcp/31331")]
    assert meeting_points([direct]) == [(SECOND, "/ip4/5.9.0.2/tcp/4001")]
    assert meeting_points([f"/ip4/127.0.0.1/tcp/4001/p2p/{SECOND}"]) == [], (
        "loopback proves nothing"
    )


def test_the_fix_names_this_machines_own_address_and_port() -> None:
    own = [f"/ip4/192.168.1.7/tcp/5000/p2p/{SECOND}"]
    assert opening_fix("5.9.0.4", own, ["/ip4/0.0.0.0/tcp/5000"], False) == (
        "on the router at 5.9.0.4, forward TCP port 5000 to 192.168.1.7, and start with "
        "--listen /ip4/0.0.0.0/tcp/5000"
    )
    assert opening_fix("5.9.0.4", own, ["/ip4/0.0.0.0/tcp/5000"], True) == (
        "on the router at 5.9.0.4, forward TCP ports 5000 and 5001 (the second for direct lines) "
        "to 192.168.1.7, and start with --listen /ip4/0.0.0.0/tcp/5000"
    )
    assert "ports 31330 and 31331" in opening_fix("5.9.0.4", own, ["/ip4/0.0.0.0/tcp/0"], True)
    for takes_lines, others in ((False, "TCP port 31340"), (True, "TCP ports 31340 and 31341")):
        told = opening_fix("5.9.0.4", own, ["/ip4/0.0.0.0/tcp/0"], takes_lines)
        assert f"; a second machine behind that router takes {others}" in told
    public = [f"/ip4/5.9.0.4/tcp/5000/p2p/{SECOND}"]
    for takes_lines, allowed in ((False, "5000"), (True, "5000:5001")):
        assert f"firewall (sudo ufw allow {allowed}/tcp)" in opening_fix(
            "5.9.0.4", public, ["/ip4/0.0.0.0/tcp/5000"], takes_lines
        )


def test_a_link_that_leads_another_way_is_measured_anew() -> None:
    record = SelfRecord(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    record._links[FIRST] = Link(1_000_000, 1_000_000)
    record._straight[FIRST] = False
    assert not record.forget_where_changed({FIRST: False})
    assert record.unmeasured([FIRST]) == []
    assert record.forget_where_changed({FIRST: True})
    assert record.unmeasured([FIRST]) == [FIRST]


def test_what_went_the_other_way_says_nothing_of_a_link_that_was_measured_anew() -> None:
    """Through a relay went 1 MB/s. The direct link was measured, and the record said at once again
    what had gone through the relay. As no plan sends over such a link, it said so for good."""
    way = {FIRST: (f"{RELAYED}/p2p/{FIRST}",)}

    async def ends() -> dict[str, tuple[str, ...]]:
        return way

    async def told() -> None:
        loops._network.reachability.changed.clear()

    record = Failing(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    record._links[FIRST], record._straight[FIRST] = Link(1_000_000, 1_200_000), False
    host: Any = SimpleNamespace(is_only_local=False, remote_addresses=ends)
    loops = keeping_presence(host, SimpleNamespace(changed=asyncio.Event()), record, [])
    loops._tell_where = told  # type: ignore[method-assign]
    keeping = keeping_links(record, {FIRST: 1})
    keeping._messenger = SimpleNamespace(known=(FIRST,))  # type: ignore[assignment]

    async def scenario() -> None:
        loops._bulk = plane = BulkPlane(host, "00" * 32, BulkListeners(Any, Any))  # type: ignore
        plane._measured(FIRST, 1_000_000)
        looking = asyncio.create_task(loops.keep_reachable())
        try:
            for is_direct in (False, True):
                if is_direct:
                    way[FIRST] = ("/ip4/5.9.0.2/tcp/4001",)
                loops._network.reachability.changed.set()
                await asyncio.sleep(0.02)
                assert (record.link_to(FIRST) is None) == is_direct
                assert (plane.link_estimate(FIRST) is None) == is_direct
        finally:
            looking.cancel()
        record.fails = False
        assert await keeping.measure_links()
        measured = record.link_to(FIRST)
        assert not record.learn_from_traffic(plane.link_estimate)
        assert record.link_to(FIRST) == measured
        plane._measured(FIRST, 5_000_000)
        assert record.learn_from_traffic(plane.link_estimate), "what goes over it now counts"

    asyncio.run(scenario())


class Failing(SelfRecord):
    """A record whose probes fail for as long as `fails`, and are counted."""

    fails, probes = True, 0

    async def _probe(self, peer_id: str, messenger: Any) -> bool:
        self.probes += 1
        if not self.fails:
            self._links[peer_id] = Link(1_000_000, 1_000_000)
        return not self.fails


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock in seconds, which tests move."""
    seconds = [1000.0]
    monkeypatch.setattr(now, "monotonic_s", lambda: seconds[0])
    monkeypatch.setattr(self_record, "PROBE_PAUSE_S", 0.0)
    return seconds


def keeping_links(record: SelfRecord, lives: dict[str, int], view: object = None) -> RecordKeeping:
    """The part that measures the links of `record` and knows the addresses of two peers. `lives`:
    the peers that are there."""
    keeping = RecordKeeping.__new__(RecordKeeping)
    keeping._messenger = SimpleNamespace(known=(FIRST, RELAY))  # type: ignore[assignment]
    keeping._agreement = SimpleNamespace(view=view)  # type: ignore[assignment]
    keeping._membership = SimpleNamespace(  # type: ignore[assignment]
        self_record=record, lives=lambda: lives, waiting_too=()
    )
    return keeping


def test_a_link_that_could_not_be_measured_is_measured_later(clock: list[float]) -> None:
    """The link was never measured again: its other end was too busy for a second, and the plan went
    by a guess for good. A peer that fails again is tried ever more seldom."""
    record = Failing(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    keeping = keeping_links(record, {FIRST: 1, RELAY: 1})

    async def scenario() -> None:
        assert not await keeping.measure_links() and record.probes == 2 * PROBE_ROUNDS
        clock[0] += PROBE_AGAIN_S - 1
        assert not await keeping.measure_links() and record.probes == 2 * PROBE_ROUNDS
        clock[0] += 1
        for _ in range(3):
            await keeping.measure_links()  # one at a time: each may take long to fail
        assert record.probes == 4 * PROBE_ROUNDS
        clock[0] += PROBE_AGAIN_S
        assert not await keeping.measure_links() and record.probes == 4 * PROBE_ROUNDS
        clock[0] += PROBE_AGAIN_S
        record.fails = False
        assert await keeping.measure_links() and await keeping.measure_links()
        assert record.link_to(FIRST) and record.link_to(RELAY)
        clock[0] += 100 * PROBE_AGAIN_S
        assert not await keeping.measure_links() and record.probes == 4 * PROBE_ROUNDS + 2

    asyncio.run(scenario())


def test_a_link_to_who_was_away_is_measured_when_it_comes_back(clock: list[float]) -> None:
    """The first peer after a power cut calls all others in vain, and measured no link to them in
    all its life. While they are away they are not tried."""
    record = Failing(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    lives: dict[str, int] = {}
    keeping = keeping_links(record, lives)

    async def scenario() -> None:
        await keeping.measure_links()
        tried = record.probes
        clock[0] += 100 * PROBE_AGAIN_S
        assert not await keeping.measure_links() and record.probes == tried
        lives[FIRST] = 2
        assert not await keeping.measure_links() and record.probes == tried + PROBE_ROUNDS
        assert not await keeping.measure_links() and record.probes == tried + PROBE_ROUNDS
        lives[FIRST], record.fails = 3, False
        assert await keeping.measure_links()
        assert record.link_to(FIRST) and not record.link_to(RELAY)

    asyncio.run(scenario())


def test_who_calls_many_that_are_away_does_other_things_in_between(clock: list[float]) -> None:
    """Each took fifteen seconds not to answer. For minutes a founder that came back to sixteen of
    them saw nothing that was worth a new plan."""

    class Silent(Failing):
        async def _probe(self, peer_id: str, messenger: Any) -> bool:
            clock[0] += 5.0
            return await super()._probe(peer_id, messenger)

    record = Silent(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    keeping = keeping_links(record, {})
    met = tuple(f"met-{number}" for number in range(16))
    keeping._messenger = SimpleNamespace(known=met)  # type: ignore[assignment]
    for turn in range(1, len(met) + 1):
        asyncio.run(keeping.measure_links())
        assert record.probes == turn * PROBE_ROUNDS
    assert not asyncio.run(keeping.measure_links()) and record.probes == len(met) * PROBE_ROUNDS


def test_who_has_met_many_measures_those_who_are_there(clock: list[float]) -> None:
    """A peer that had met 64 peers in its life measured no link to a newcomer any more."""
    record = Failing(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    record.fails = False
    gone = [f"gone-{number}" for number in range(100)]
    record._links = {peer: Link(1_000_000, 1_000_000) for peer in gone[:64]}
    keeping = keeping_links(record, {FIRST: 1}, view=object())
    keeping._messenger = SimpleNamespace(known=(FIRST, *gone))  # type: ignore[assignment]
    keeping._compare_with_estimate = lambda peer_id: None  # type: ignore[method-assign]
    assert asyncio.run(keeping.measure_links())
    assert record.link_to(FIRST) and record.probes == 1, "who has gone is not called"


def test_the_record_says_how_a_peer_is_reached() -> None:
    record = SelfRecord(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    record.state_reachability((RELAYED,), Reachability.RELAYED)
    made, _ = record.make(lambda payload: b"")
    assert (made.addresses, made.reachability) == ((RELAYED,), Reachability.RELAYED)


def seen_by(answers: dict[str, tuple[int, ...]], trusted: str) -> ReachabilityService:
    """The service of a peer behind a router, with a relay. `answers`: at which ports each peer says
    that it gets through."""

    async def see(peer_id: str) -> SeenAddress:
        return SeenAddress("5.9.0.4", 4001, answers[peer_id])

    async def nowhere() -> tuple[str, ...]:
        return ()

    async def ends() -> dict[str, tuple[str, ...]]:
        return {it: (f"/ip4/5.9.0.{n}/tcp/4001",) for n, it in enumerate((RELAY, *answers))}

    host: Any = SimpleNamespace(
        is_only_local=False,
        peer_id=FIRST,
        found_addresses=(RELAYED,),
        addresses=nowhere,
        remote_addresses=ends,
        calling=SimpleNamespace(trusts=lambda peer_id: peer_id in (RELAY, trusted)),
    )
    service = ReachabilityService(host)
    service._see = see  # type: ignore[method-assign]
    service.finding = ReachabilityFinding(Reachability.RELAYED, "", "5.9.0.4", 4001)
    for relay in (RELAY, SECOND):
        service._reservations[relay] = _Reservation(RELAYED, 1e12)
    answers[RELAY] = answers[SECOND] = ()
    return service


def test_a_stranger_does_not_talk_a_peer_out_of_its_relays() -> None:
    """The stranger said that it got through. From then on nobody else did, and the peer asked no
    one any more."""
    liars = {f"12D3KooW{n}": (4001,) for n in "123"}
    service = seen_by(dict(liars), "")
    asyncio.run(service._look_after())
    assert service.relays == tuple(sorted((RELAY, SECOND)))
    assert service.is_behind_router


def test_where_most_that_it_trusts_get_through_it_needs_no_relays_any_more() -> None:
    service = seen_by({"12D3KooW1": (4001,), SECOND: (4001,)}, SECOND)
    service._see = lambda peer_id: _open(peer_id)  # type: ignore[method-assign]
    asyncio.run(service._look_after())
    assert service.relays == () and not service.is_behind_router


def at_home(answering: set[str]) -> ReachabilityService:
    """The service of a peer with three neighbours, that get through to it, and a relay elsewhere,
    that does not. They are members, and `answering` are those that answer."""
    neighbours = [f"12D3KooW{n}" for n in "123"]
    service = seen_by({it: (4001,) for it in neighbours}, "")
    service._host.calling.trusts = lambda peer_id: peer_id in (RELAY, *neighbours)

    async def ends() -> dict[str, tuple[str, ...]]:
        at = {it: (f"/ip4/192.168.1.{n}/tcp/4001",) for n, it in enumerate(neighbours)}
        return {**at, RELAY: ("/ip4/5.9.0.1/tcp/4001",), SECOND: ("/ip4/5.9.0.2/tcp/4001",)}

    async def see(peer_id: str) -> SeenAddress | None:
        if peer_id not in answering:
            return None
        is_near = peer_id in neighbours
        return SeenAddress("192.168.1.7" if is_near else "5.9.0.4", 4001, (4001,) * is_near)

    service._see, service._host.remote_addresses = see, ends  # type: ignore[method-assign]
    return service


@pytest.mark.parametrize("silent", ["", RELAY])
def test_neighbours_do_not_talk_a_peer_out_of_its_relays(silent: str) -> None:
    """Most of three that it trusts were machines of its own home, which get through to it there. It
    gave up its relays, and nobody elsewhere could reach it for ten minutes."""
    service = at_home({f"12D3KooW{n}" for n in "123"} | {RELAY, SECOND} - {silent})
    asyncio.run(service._look_after())
    assert service.relays == tuple(sorted((RELAY, SECOND))) and service.is_behind_router


def test_but_where_all_are_neighbours_their_word_counts() -> None:
    service = at_home({f"12D3KooW{n}" for n in "123"})
    service.finding = ReachabilityFinding(Reachability.UNKNOWN, "")
    asyncio.run(service._look_after())
    assert service.finding.reachability is Reachability.DIRECT
    service = at_home({f"12D3KooW{n}" for n in "123"})
    service.doubt()
    asyncio.run(service._look_after())
    assert not service.is_behind_router, "it was carried home"


def called_at(*views: tuple[str, int]) -> list[str]:
    """The addresses that a peer states beside its own, after it was called back. Each view gives
    the host, and how many ports answered there."""
    answers = {f"12D3KooW{n}": (4001,) * count for n, (_, count) in enumerate(views)}
    service = seen_by(answers, "")
    service._reservations.clear()
    service.finding = ReachabilityFinding(Reachability.UNKNOWN, "")
    hosts = dict(zip(answers, (host for host, _ in views), strict=False))

    async def see(peer_id: str) -> SeenAddress:
        return SeenAddress(hosts[peer_id], 9, answers[peer_id])

    async def own() -> tuple[str, ...]:
        return (f"/ip4/192.168.1.7/tcp/4001/p2p/{FIRST}", f"/ip4/5.9.0.8/tcp/4001/p2p/{FIRST}")

    service._see, service._host.addresses = see, own  # type: ignore[method-assign]
    service._host.found_addresses = ()
    asyncio.run(service._ask(list(hosts)))
    assert service.changed.is_set() == bool(service._host.found_addresses)
    return [it.removesuffix(f"/p2p/{FIRST}") for it in service._host.found_addresses]


def test_who_is_called_at_its_router_tells_others_to_call_there() -> None:
    """Each of two peers had forwarded a port by hand, and gave up its relays. Each knew only the
    other's address at home, and neither could call."""
    there = ["/ip4/5.9.0.4/tcp/4001"]
    assert called_at(("5.9.0.4", 1)) == called_at(("5.9.0.4", 1), ("5.9.0.4", 0)) == there
    assert called_at(("192.168.1.7", 1), ("5.9.0.4", 1)) == there, "a neighbour sees it elsewhere"
    assert called_at(("2001:db8::1", 0), ("2a01::7", 1)) == ["/ip6/2a01::7/tcp/4001"]
    assert called_at(("5.9.0.4", 0)) == called_at(("192.168.1.7", 1)) == []
    assert called_at(("5.9.0.8", 1)) == [], "p2pd states it by itself"
    assert called_at(("5.9.0.4", 0), ("5.9.0.4", 0), ("5.9.0.66", 1)) == [], "of one liar's word"


def test_who_is_called_there_no_more_does_not_say_so_any_longer() -> None:
    service = seen_by({"12D3KooW1": (4001,)}, "12D3KooW1")
    service._see = _open  # type: ignore[method-assign]
    asyncio.run(service._ask(["12D3KooW1"]))
    assert service._host.found_addresses == (f"/ip4/5.9.0.4/tcp/4001/p2p/{FIRST}",)
    service.changed.clear()
    service._see = _closed  # type: ignore[method-assign]
    for _ in range(2):
        asyncio.run(service._ask(["12D3KooW1"]))
    assert service._host.found_addresses == () and service.changed.is_set()


def test_whose_router_has_forgotten_what_it_forwards_hears_of_it_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer that could be called once was believed to be so for ever. Strangers are asked for
    nothing."""
    asked, trusted = list[str](), "12D3KooW1"
    service = seen_by({trusted: (), "12D3KooW2": ()}, trusted)
    service._reservations.clear()
    service.finding = ReachabilityFinding(Reachability.DIRECT, "", "5.9.0.4", 4001)

    async def see(peer_id: str) -> SeenAddress:
        asked.append(peer_id)
        return SeenAddress("5.9.0.4", 4001, ())

    async def reserve_of(host: Any, relay: str) -> float:
        return 3600.0

    monkeypatch.setattr(reachability, "reserve", reserve_of)
    service._see = see  # type: ignore[method-assign]
    service._asked_s = now.monotonic_s()
    asyncio.run(service._look_after())
    assert not asked and not service.is_behind_router
    service._asked_s -= reachability.ASK_WHO_IS_CERTAIN_S + 1
    asyncio.run(service._look_after())
    assert set(asked) == {RELAY, trusted} and not service.is_behind_router, "once is by chance"
    asyncio.run(service._look_after())
    assert len(asked) == 2
    service._asked_s -= reachability.ASK_AGAIN_S + 1
    asyncio.run(service._look_after())
    assert len(asked) == 4 and service.is_behind_router and service.relays


def test_one_renewal_without_an_answer_gives_up_no_relay(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relay that was busy for a moment was given up, and asked again after a minute."""
    service = seen_by({RELAY: ()}, RELAY)
    answers = [False, True, False, False, False]

    async def reserve(host: Any, relay: str) -> float:
        if not answers.pop(0):
            raise Unreachable(relay, "no answer within 10 s")
        return 3600.0

    monkeypatch.setattr(reachability, "reserve", reserve)
    service._reservations[RELAY] = reachability._Reservation(RELAYED, 0.0)
    held = []
    while answers:
        clock[0] += reachability.RENEW_S + 1
        asyncio.run(service._reserve())
        held.append(RELAY in service.relays)
    assert held == [True, True, True, True, False], "three in a row do"


def test_whose_relays_go_on_tells_where_its_router_sends_from_now() -> None:
    """Others need that address to punch: they dialled the router's address from before the move."""
    service = seen_by({"12D3KooW1": ()}, "12D3KooW1")
    service.finding = replace(service.finding, public_host="5.9.9.9", public_port=1)
    asyncio.run(service._look_after())
    assert service.finding.reachability is Reachability.RELAYED
    assert (service.finding.public_host, service.finding.public_port) == ("5.9.0.4", 4001)


def test_who_knows_nobody_asks_as_soon_as_somebody_is_there_and_again_soon_without_an_answer(
    clock: list[float],
) -> None:
    """A founder behind a router started while all others were away. It took itself for callable,
    and had no relay, for a minute after they had come back."""
    service = seen_by({"12D3KooW1": ()}, "12D3KooW1")
    service._reservations.clear()
    service.finding = ReachabilityFinding(Reachability.UNKNOWN, "")
    service._reserve = _nobody_else  # type: ignore[method-assign]
    ends, service._host.remote_addresses = service._host.remote_addresses, _nobody_at_all
    asyncio.run(service._look_after())
    service._host.remote_addresses, answers = ends, list[str]()

    async def silent(peer_id: str) -> None:
        answers.append(peer_id)

    service._see = silent  # type: ignore[method-assign]
    clock[0] += reachability.LOOK_S
    asyncio.run(service._look_after())
    assert answers and service.finding.reachability is Reachability.UNKNOWN
    service._see = _closed  # type: ignore[method-assign]
    clock[0] += reachability.UNANSWERED_AGAIN_S - 1
    asyncio.run(service._look_after())
    assert service.finding.reachability is Reachability.UNKNOWN
    clock[0] += 2
    asyncio.run(service._look_after())
    assert service.finding.reachability is Reachability.UNREACHABLE


async def _nobody_at_all() -> dict[str, tuple[str, ...]]:
    return {}


async def _nobody_else() -> None:
    return


async def _open(peer_id: str) -> SeenAddress:
    return SeenAddress("5.9.0.4", 4001, (4001,))


async def _closed(peer_id: str) -> SeenAddress:
    return SeenAddress("5.9.0.4", 4001, ())


def test_strangers_that_say_nothing_do_not_keep_a_peer_from_its_relays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each stranger is waited for, and a stranger may choose an id that comes first."""
    strangers = [f"12D3KooA{number:02}" for number in range(50)]
    asked: list[str] = []

    async def ends() -> dict[str, tuple[str, ...]]:
        return {it: ("/ip4/5.9.0.1/tcp/4001",) for it in (*strangers, FIRST, RELAY)}

    async def reserve(host: Any, relay: str) -> float:
        asked.append(relay)
        if relay in strangers:
            raise Unreachable(relay, "it does not answer as a relay")
        return 3600.0

    monkeypatch.setattr(reachability, "reserve", reserve)
    trusted: Any = SimpleNamespace(trusts=lambda peer: peer in (FIRST, RELAY))
    host: Any = SimpleNamespace(
        calling=trusted, remote_addresses=ends, peer_id=SECOND, found_addresses=()
    )

    async def scenario() -> None:
        service = ReachabilityService(host)
        await service._reserve()
        assert asked == sorted([FIRST, RELAY]) and len(service.relays) == 2
        asked.clear()
        trusted.trusts = lambda peer: False
        service._reservations.clear()
        await service._reserve()
        assert len(asked) == ASKED_LIMIT

    asyncio.run(scenario())


def test_what_could_not_be_told_of_another_way_is_told_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "WAY_RETRY_S", 0.001)
    told: list[Any] = []
    changed, answers = asyncio.Event(), [Unreachable(SECOND, "busy"), (RELAYED,)]

    async def addresses() -> tuple[str, ...]:
        answer = answers.pop(0)
        if isinstance(answer, Unreachable):
            raise answer
        return answer

    async def ends() -> dict[str, tuple[str, ...]]:
        raise Unreachable(SECOND, "busy")

    host = SimpleNamespace(
        is_only_local=False, addresses=addresses, remote_addresses=ends, found_addresses=()
    )
    service = SimpleNamespace(
        changed=changed, finding=ReachabilityFinding(Reachability.RELAYED, ""), doubt=lambda: None
    )
    record = SelfRecord(Member(SECOND, 1), "00" * 32, device(), (), None)  # type: ignore[arg-type]
    loops = keeping_presence(host, service, record, told)

    async def scenario() -> None:
        changed.set()
        loop = asyncio.create_task(loops.keep_reachable())
        await asyncio.sleep(0.2)
        loop.cancel()
        assert told == [((RELAYED,), Reachability.RELAYED)] and loops._moved.is_set()

    asyncio.run(scenario())


def keeping_presence(
    host: Any, service: Any, record: SelfRecord, told: list[Any]
) -> presence.PresenceKeeping:
    """The parts that tell others of the way in. `told`: what each new version of `record` says of
    it."""
    loops = presence.PresenceKeeping.__new__(presence.PresenceKeeping)
    loops._network = SimpleNamespace(host=host, reachability=service)  # type: ignore[assignment]

    def set_record() -> None:
        made, _ = record.make(lambda payload: b"")
        told.append((made.addresses, made.reachability))

    loops._membership = SimpleNamespace(  # type: ignore[assignment]
        self_record=record,
        set_record=set_record,
        acquaintances=SimpleNamespace(look_around=lambda: None),
    )
    loops._moved, loops._told_s, loops._own = asyncio.Event(), -math.inf, None
    return loops


LOOPBACK, HERE, THERE = (
    f"/ip4/{host}/tcp/4001/p2p/{SECOND}" for host in ("127.0.0.1", "5.9.0.2", "5.9.0.3")
)


class Moving:
    """The host of a peer that can be called and is moved about, and the part that tells others of
    it."""

    is_only_local = False
    peer_id = SECOND
    found_addresses: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.own: tuple[str, ...] = (HERE,)
        self.rounds = 0
        self.calling = SimpleNamespace(trusts=lambda peer_id: True)
        self.service = ReachabilityService(self)  # type: ignore[arg-type]
        self.service.finding = ReachabilityFinding(Reachability.DIRECT, "", "5.9.0.2", 4001)
        self.told: list[Any] = []
        record = SelfRecord(Member(SECOND, 1), "00" * 32, device(), (HERE,), None)  # type: ignore[arg-type]
        record.state_reachability((HERE,), Reachability.DIRECT)
        self.presence = keeping_presence(self, self.service, record, self.told)

    async def addresses(self) -> tuple[str, ...]:
        self.rounds += 1
        return self.own

    async def remote_addresses(self) -> dict[str, tuple[str, ...]]:
        return {FIRST: ("/ip4/5.9.0.1/tcp/4001",)}

    async def tell(self) -> list[Any]:
        """What the peer has told by the end of a few rounds."""
        loop, enough = asyncio.create_task(self.presence.keep_reachable()), self.rounds + 5
        while self.rounds < enough:
            assert not loop.done(), loop
            await asyncio.sleep(0.001)
        loop.cancel()
        return self.told


@pytest.fixture
def moving(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> Moving:
    monkeypatch.setattr(presence, "WAY_REFRESH_S", 0.001)
    return Moving()


def test_a_peer_whose_address_changes_tells_the_new_one(moving: Moving, clock: list[float]) -> None:
    """The peer told its old address for as long as it lived, as it noticed a change of relays
    alone. An address that changes to and fro is told once a minute. That there is no network for
    now is not told at all."""
    direct = Reachability.DIRECT

    async def scenario() -> None:
        assert await moving.tell() == [] and not moving.presence._moved.is_set()
        moving.own = (LOOPBACK,)
        assert await moving.tell() == []
        moving.own = (THERE,)
        assert await moving.tell() == [((THERE,), direct)] and moving.presence._moved.is_set()
        moving.own = (HERE, THERE)
        assert await moving.tell() == [((THERE,), direct)]
        clock[0] += presence.MOVED_AGAIN_S
        moving.own = (THERE, HERE)
        assert (await moving.tell())[1:] == [((THERE, HERE), direct)]
        clock[0] += presence.MOVED_AGAIN_S
        moving.own = (HERE, THERE)
        assert len(await moving.tell()) == 2, "the same ones"

    asyncio.run(scenario())


def test_a_way_in_that_others_have_found_is_told_and_is_no_move(
    moving: Moving, clock: list[float]
) -> None:
    """The machine is where it was, so nobody need look again."""
    found = f"/ip4/5.9.0.4/tcp/4001/p2p/{SECOND}"

    async def scenario() -> None:
        for there, here in (((found,), (found, HERE)), ((), (HERE,))):
            clock[0] += presence.MOVED_AGAIN_S
            moving.found_addresses, moving.own = there, here
            assert (await moving.tell())[-1] == (here, Reachability.DIRECT)
            assert not moving.service._is_doubted

    asyncio.run(scenario())


def test_a_peer_that_has_moved_behind_a_router_takes_relays(
    moving: Moving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that could be called once never asked anybody again."""
    answers: list[SeenAddress | None] = [None, SeenAddress("5.9.0.9", 4001, ())]
    asked, service = [0], moving.service

    async def see(peer_id: str) -> SeenAddress | None:
        asked[0] += 1
        return answers.pop(0)

    async def reserve_of(host: Any, relay: str) -> float:
        return 3600.0

    monkeypatch.setattr(reachability, "reserve", reserve_of)
    service._see = see  # type: ignore[method-assign]

    async def scenario() -> None:
        service._asked_s = now.monotonic_s()
        await service._look_after()
        assert asked == [0]
        moving.own = (THERE,)
        await moving.tell()
        await service._look_after()
        await service._look_after()
        assert asked == [1] and not service.is_behind_router, "nobody has answered"
        service._asked_s -= reachability.ASK_AGAIN_S + 1
        await service._look_after()
        assert asked == [2] and service.relays == (FIRST,)
        assert moving.told[-1] == ((THERE,), Reachability.DIRECT)
        assert (await moving.tell())[-1] == ((THERE,), Reachability.RELAYED)

    asyncio.run(scenario())


def test_a_peer_that_has_moved_asks_again_soon_where_nobody_answers(
    moving: Moving, clock: list[float]
) -> None:
    """Its connections are those of where it was, and p2pd takes up to 39 s to give them up. Whoever
    it had asked over them could not answer, and for a minute it asked nobody else."""
    service, asked = moving.service, list[str]()

    async def silent(peer_id: str) -> None:
        asked.append(peer_id)

    async def scenario() -> None:
        service._asked_s = clock[0]
        service.doubt()
        await service._look_after()
        clock[0] += reachability.UNANSWERED_AGAIN_S - 1
        await service._look_after()
        assert len(asked) == 1
        clock[0] += 2
        await service._look_after()
        assert len(asked) == 2

    service._see = silent  # type: ignore[method-assign]
    asyncio.run(scenario())


def test_others_join_where_a_peer_is_now() -> None:
    """`status` told the address from when the view was agreed on; a view may stand for weeks."""
    own = SelfRecord(Member(SECOND, 1), "00" * 32, device(), (THERE,), None)  # type: ignore[arg-type]
    status = StatusApi.__new__(StatusApi)
    status._network = SimpleNamespace(me=Member(SECOND, 1))  # type: ignore[assignment]
    membership = SimpleNamespace(self_record=own)
    status.participant = SimpleNamespace(membership=membership)  # type: ignore[assignment]
    records = (record_of(SECOND, addresses=(HERE,)),)
    view: Any = SimpleNamespace(member_ids=(SECOND,), snapshot=SimpleNamespace(records=records))
    assert status._addresses_in(view) == [THERE]
    view.member_ids, view.snapshot.records = (FIRST,), ()
    assert status._addresses_in(view) == status._addresses_in(None) == []


def test_ways_in_words() -> None:
    assert way_words(None) is None
    assert way_words("/ip4/5.9.0.1/tcp/4001") == "direct"
    assert way_words(RELAYED) == f"relayed by {FIRST}"
