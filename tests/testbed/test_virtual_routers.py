"""Machines behind routers in virtual time: how each is called, and what becomes of a way in."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.daemon.peers.reachability import LOOK_S, RENEW_S, ReachabilityService
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable, no_relay_has_it, nobody_listens
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.routers import ways_in
from p2p_dtfm.testbed.virtual.routers.circuits import ANSWERS_WITHIN_S, KEEPS_ALIVE_S
from p2p_dtfm.testbed.virtual.routers.sockets import no_sockets_of_this_machine
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.first_seeds import ROUTERS
from p2p_dtfm.testbed.virtual.swarm import Swarm, play
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork

NAMES = ("relay", "other relay", "one", "another")
OPEN, BEHIND = NAMES[:2], NAMES[2:]


class World:
    """Two peers that can be called, and two that cannot."""

    def __init__(self, network: VirtualNetwork, loop: VirtualLoop, folder: Path) -> None:
        self.network, self.loop = network, loop
        self.lives: dict[str, int] = {}
        identities = {name: Identity.load_or_create(folder / name) for name in NAMES}
        ids = {name: identity.peer_id for name, identity in identities.items()}
        self.network.put_behind_routers([ids[name] for name in BEHIND], "chance")
        self.processes = {name: Process(name, loop, random.Random(name)) for name in NAMES}
        self.hosts: dict[str, VirtualHost] = {
            name: self.network.join(self.processes[name], identities[name]) for name in NAMES
        }
        self.services: dict[str, ReachabilityService] = {}

    async def ready(self) -> None:
        """All peers serve, and those behind routers have found that out."""
        for name, host in self.hosts.items():
            await host.serve_calls("echo", _echo)
            await host.serve_calls("slow", _slow)
            await self._in(name, self._find(name, host))

    def _in(self, name: str, work: Any) -> Any:
        return self.processes[name].begin(work)

    async def _find(self, name: str, host: VirtualHost) -> None:
        service = self.services[name] = await ReachabilityService(host).ready()
        others = [self.whole(it) for it in OPEN if it != name and it in self.services]
        for address in others:
            where, _, peer_id = address.rpartition("/p2p/")
            await host.connect(peer_id, [where], 5.0)
        await service.find(others)
        self.processes[name].begin(service.keep())

    def whole(self, name: str) -> str:
        host = self.hosts[name]
        return f"{host.address}/p2p/{host.peer_id}"

    async def call(self, name: str, other: str) -> bytes:
        origin, goal = self.hosts[name], self.hosts[other]
        origin.know(goal.peer_id, await goal.addresses())
        return await origin.call(goal.peer_id, "echo", b"hello", 5.0)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.network.leave(self.hosts[name])

    async def start_again(self, name: str) -> None:
        """Start the peer again in another process, at the same address."""
        self.kill(name)
        lives = self.lives[name] = self.lives.get(name, 0) + 1
        process = self.processes[name] = Process(f"{name} {lives}", self.loop, random.Random(name))
        host = self.hosts[name] = self.network.join(process, self.hosts[name].identity)
        await host.serve_calls("echo", _echo)
        await self._in(name, self._find(name, host))

    def ends(self, name: str, other: str) -> tuple[str, ...]:
        return self.hosts[name]._ends_at(self.hosts[other].peer_id)


async def _slow(sender: str, body: bytes) -> bytes:
    await asyncio.sleep(60.0)
    return body


async def _echo(sender: str, body: bytes) -> bytes:
    return body


def played(folder: Path, scene: Callable[[World], Awaitable[None]]) -> None:
    async def whole(swarm: Swarm) -> None:
        world = World(swarm.network, swarm.loop, folder)
        await world.ready()
        await scene(world)

    with no_sockets_of_this_machine():
        play(1, folder, whole)


def test_who_is_behind_a_router_finds_that_out_and_is_reached_through_relays(
    tmp_path: Path,
) -> None:
    async def scene(world: World) -> None:
        found = {name: service.finding for name, service in world.services.items()}
        assert found["other relay"].reachability is Reachability.DIRECT
        assert found["one"].reachability is Reachability.RELAYED
        assert found["one"].public_host != world.hosts["one"].address.split("/")[2]
        assert len(world.services["one"].relays) == 2
        one, another = world.hosts["one"], world.hosts["another"]
        with pytest.raises(Unreachable) as refused:
            seen = world.network.ways_in.seen_address(another.peer_id)  # type: ignore[union-attr]
            await one.connect(another.peer_id, [another.address, seen], 6.0)
        assert not nobody_listens(refused.value.cause)
        assert await world.call("one", "another") == b"hello"
        assert await one.direct_address(another.peer_id) is None
        assert all("/p2p-circuit" in end for end in world.ends("one", "another"))
        assert world.ends("another", "one") == world.ends("one", "another")

    played(tmp_path, scene)


def test_a_way_lasts_as_long_as_its_relay_and_another_one_is_found(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        one, another = world.hosts["one"], world.hosts["another"]
        assert await world.call("one", "another") == b"hello"
        (used,) = world.ends("one", "another")
        relay = next(name for name in OPEN if world.hosts[name].peer_id in used)
        kept = asyncio.create_task(one.call(another.peer_id, "slow", b"", 60.0))
        await asyncio.sleep(0.1)
        world.kill(relay)
        with pytest.raises(Unreachable, match="stream reset"):
            await kept
        await asyncio.sleep(LOOK_S + 0.5)
        assert world.hosts[relay].peer_id not in world.services["another"].relays
        assert await world.call("one", "another") == b"hello"
        assert used not in world.ends("one", "another")

    played(tmp_path, scene)


def one_way(where: tuple[str, ...]) -> list[str]:
    return [address for address in where if "/p2p-circuit" in address]


def test_a_relay_out_of_reach_does_not_keep_from_the_other_one(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        one, another = world.hosts["one"], world.hosts["another"]
        links, near = world.network.links, one_way(await another.addresses())[0]
        relay = near.split("/")[6]
        await one.disconnect(relay)
        await asyncio.sleep(0.5)
        links.cut(one.peer_id, relay)
        links.cut(relay, one.peer_id)
        began_s = world.loop.time()
        assert await world.call("one", "another") == b"hello"
        assert world.loop.time() - began_s < 1.0

    played(tmp_path, scene)


def test_a_relay_that_has_lost_who_is_called_says_so_at_once(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        one, another = world.hosts["one"], world.hosts["another"]
        where = await another.addresses()
        for name in OPEN:
            world.hosts[name].know(another.peer_id, where)
        world.kill("another")
        await asyncio.sleep(1.0)
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with pytest.raises(Unreachable) as refused:
            await one.connect(another.peer_id, one_way(where), 10.0)
        assert no_relay_has_it(refused.value.cause)
        assert loop.time() - began_s < 1.0, "they had looked for it one through the other"

    played(tmp_path, scene)


def test_a_relay_that_was_started_again_is_asked_again_though_its_connection_is_back(
    tmp_path: Path,
) -> None:
    """The relay restarted between two looks of the peer. It had forgotten, for half an hour, the
    peers that relied on it."""

    async def scene(world: World) -> None:
        one, another = world.hosts["one"], world.hosts["another"]
        relay = world.hosts["relay"]
        way = next(at for at in await another.addresses() if relay.peer_id in at)
        await asyncio.sleep(2 * LOOK_S)  # both look a moment before and after
        await world.start_again("relay")
        for name in BEHIND:
            await world.hosts[name].connect(relay.peer_id, [relay.address], 5.0)
        with pytest.raises(Unreachable, match="NO_RESERVATION"):
            await one.connect(another.peer_id, [way], 5.0)
        await asyncio.sleep(RENEW_S + LOOK_S + 1.0)
        assert relay.peer_id in world.services["another"].relays
        await one.connect(another.peer_id, [way], 5.0)

    played(tmp_path, scene)


def test_a_relay_that_stands_still_ends_what_goes_over_it_in_time(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        assert await world.call("one", "another") == b"hello"
        (used,) = world.ends("one", "another")
        relay = next(name for name in OPEN if world.hosts[name].peer_id in used)
        world.processes[relay].pause()
        await asyncio.sleep(KEEPS_ALIVE_S + ANSWERS_WITHIN_S + 1.0)
        assert used not in world.ends("one", "another")
        world.processes[relay].resume()

    played(tmp_path, scene)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_two_behind_routers_open_one_connection_at_once_or_go_on_through_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    monkeypatch.setattr(ways_in, "MET", share)

    async def scene(world: World) -> None:
        one, another = world.hosts["one"], world.hosts["another"]
        assert await world.call("one", "another") == b"hello"
        where = await another.addresses()
        work = world.services["one"].straighten(another.peer_id, where)
        await world._in("one", work)
        is_direct = await one.direct_address(another.peer_id) is not None
        assert is_direct is bool(share)
        await asyncio.sleep(2 * KEEPS_ALIVE_S)
        assert await world.call("one", "another") == b"hello"
        assert await world.call("another", "one") == b"hello"
        if share:
            await world._in("another", world.services["another"].close())
            await asyncio.sleep(1.0)
            assert await one.direct_address(another.peer_id) is None, "the bridge was in between"

    played(tmp_path, scene)


def test_in_seeds_from_940000_on_some_are_behind_routers_and_never_all() -> None:
    for seed in range(ROUTERS, ROUTERS + 40):
        schedule = draw(seed)
        begun_behind = set(schedule.behind) & set(schedule.begun)
        assert 0 < len(begun_behind) <= len(schedule.begun) // 2
        assert any(fault.kind == "dead relay" for fault in schedule.faults)
