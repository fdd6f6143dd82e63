"""A member that is asked to let this peer in names other members, and is believed where they are.
One named 40 behind a third party's door, and a newcomer knocked there 40 times."""

import asyncio
import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from p2p_dtfm.core.gate.dialling import BEHIND_A_DOOR, DOORS_OF_A_HOST, NamedDoors
from p2p_dtfm.daemon.peers.messenger import GONE_AFTER_S, Messenger
from p2p_dtfm.daemon.peers.wire import Knock, PeerAddress
from p2p_dtfm.net.contacts.calling import Calling, door_of
from p2p_dtfm.net.contacts.identity import identity_of_seed
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.ports import now

IDS = [identity_of_seed(number.to_bytes(32, "big")).peer_id for number in range(400)]
VICTIM_HOST = "1.2.3.4"
VICTIM = f"/ip4/{VICTIM_HOST}/tcp/443"


def messenger() -> Messenger:
    async def nobody() -> dict[str, tuple[str, ...]]:
        return {}

    host: Any = SimpleNamespace(peer_id="me", know=lambda *given: None, calling=Calling(nobody))
    return Messenger(host, None, life=1)  # type: ignore[arg-type]


def knocks(heard: Messenger, host: str = VICTIM_HOST) -> int:
    """For how many peers this peer would knock at an address of that host."""
    found = set()
    for peer_id in heard.known:
        for address in heard.where(peer_id):
            door = door_of(address)
            if door is not None and door[0] == host:
                found.add(address.partition("/p2p/")[2].split("/")[0])
    return len(found)


@pytest.mark.parametrize(
    "named",
    [
        [PeerAddress(it, (VICTIM,)) for it in IDS],
        [PeerAddress(it, (f"{VICTIM}/p2p/{it}",)) for it in IDS],
        [PeerAddress(it, (f"{VICTIM}/p2p/{it}/p2p-circuit",)) for it in IDS],
    ],
    ids=["plain", "with ids", "as relays"],
)
def test_few_are_believed_to_be_behind_one_door(named: list[PeerAddress]) -> None:
    heard = messenger()
    for start in range(0, len(named), 100):  # in one answer or several
        heard.learn_named(named[start : start + 100])
    assert 0 < knocks(heard) <= BEHIND_A_DOOR


def test_and_few_doors_of_one_host_of_the_internet() -> None:
    heard = messenger()
    heard.learn_named(
        [PeerAddress(it, (f"/ip4/{VICTIM_HOST}/tcp/{n + 1}",)) for n, it in enumerate(IDS)]
    )
    assert 0 < knocks(heard) <= DOORS_OF_A_HOST


@pytest.mark.parametrize(
    "spellings",
    [
        [f"/ip6/2001:{'0' * zeros}db8::{n:x}:1" for n in (0,) for zeros in range(2)]
        + ["/ip6/2001:DB8::1", "/ip6/2001:db8:0::1", "/ip6/2001:db8:0:0::1", "/ip6/2001:db8::0:1"],
        ["/ip4/1.2.3.4", "/ip6/::ffff:1.2.3.4", "/ip6/::FFFF:1.2.3.4", "/ip6/::ffff:102:304"],
        [
            "/dns4/Victim.example",
            "/dns4/victim.example.",
            "/dns/VICTIM.example",
            "/dns6/victim.example",
        ],
    ],
    ids=["IPv6", "IPv4 in IPv6", "names"],
)
def test_and_a_host_is_one_however_it_is_spelt(spellings: list[str]) -> None:
    """Each spelling was a door of its own, at which a newcomer knocked twice more."""
    heard = messenger()
    peers = iter(IDS)
    heard.learn_named(
        PeerAddress(next(peers), (f"{spelt}/tcp/443",)) for spelt in spellings for _ in range(4)
    )
    assert len(heard.known) == BEHIND_A_DOOR


def test_a_stranger_names_no_relay_at_a_third_partys_door() -> None:
    """It named a member to which this peer has no connection as its relay, there: this peer called
    as often as it was told to, since members are called wherever they are."""
    stranger, relay = IDS[0], IDS[1]
    way = f"{VICTIM}/p2p/{relay}/p2p-circuit"

    async def nobody() -> dict[str, tuple[str, ...]]:
        return {}

    calling = Calling(nobody)
    calling.trusts = lambda peer_id: peer_id == relay
    knocks = 0
    for _ in range(40):
        with contextlib.suppress(Unreachable):
            knocks += len(calling.choose(stranger, [way]))
    assert knocks == 1
    calling._linked = {relay: ("/ip4/5.9.0.1/tcp/4001",)}
    assert calling.choose(stranger, [way]) == (way,), "p2pd goes over the connection that is there"


def test_members_are_believed_to_be_where_they_are() -> None:
    heard, relay = messenger(), IDS[0]
    at_home = [PeerAddress(it, (f"/ip4/127.0.0.1/tcp/{n + 1}",)) for n, it in enumerate(IDS[1:])]
    heard.learn_named(at_home)
    heard.learn_named(at_home)
    assert set(heard.known) == set(IDS[1:])
    heard = messenger()
    way = f"/ip4/1.2.3.9/tcp/4001/p2p/{relay}/p2p-circuit"
    heard.learn_named([PeerAddress(it, (way,)) for it in IDS[1:]])
    assert set(heard.known) == set(IDS[1:]), "they are behind one relay"


def test_what_is_remembered_of_doors_is_bounded() -> None:
    doors = NamedDoors(limit=4)
    for number in range(10):
        assert doors.admits((f"10.0.0.{number}", 1), "a", is_public=False)
    assert len(doors) == 4


def test_a_listener_that_was_named_often_is_knocked_at_seldom(tmp_path: Path) -> None:
    """Over real libp2p: each of 40 invented members is asked to let this peer in."""

    async def scenario() -> int:
        knocks = 0

        async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal knocks
            knocks += 1
            writer.close()

        server = await asyncio.start_server(knocked, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, contextlib.AsyncExitStack() as stack:
            host = await Host.start(tmp_path / "key", ["/ip4/127.0.0.1/tcp/0"])
            stack.push_async_callback(host.close)
            heard = Messenger(host, ControlPlane(host, None), life=1)  # type: ignore[arg-type]
            named = [PeerAddress(it, (f"/ip4/127.0.0.1/tcp/{port}",)) for it in IDS[:40]]
            heard.learn_named(named)
            for peer in named:
                with contextlib.suppress(Unreachable):
                    await heard.ask(peer.peer_id, Knock(""), 1.0)
        return knocks

    assert asyncio.run(scenario()) <= 10


def test_who_has_gone_is_forgotten_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each peer that was ever a member was kept, and asked for files, for a daemon's whole life."""
    seconds = [1000.0]
    monkeypatch.setattr(now, "monotonic_s", lambda: seconds[0])
    heard, (member, quiet, gone, unheard) = messenger(), IDS[:4]
    for peer_id in (member, quiet, gone, unheard):
        heard.learn(peer_id, (VICTIM,))
    heard.heard(gone)
    heard.forget_gone({member})
    assert len(heard.known) == 4, "it may have lost its line for the moment"
    seconds[0] += GONE_AFTER_S + 1
    heard.heard(quiet)
    heard.forget_gone({member})
    assert set(heard.known) == {member, quiet}
