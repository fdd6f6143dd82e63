"""Who is behind a router, and how anybody is called.

A router lets in only answers. So a peer behind one is reached over connections that it has made
itself, and through relays. The world sees that peer at its router's address.
"""

import asyncio
import contextvars
import itertools
import random
from collections import Counter
from collections.abc import Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import base58

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.addresses import far_end, is_relayed
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.nat.circuit_messages import (
    HOP_PROTOCOL,
    HopKind,
    RelayMessage,
    RelayStatus,
    StopKind,
    encode_hop,
    encode_stop,
    read_hop,
    read_stop,
)
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.routers.circuits import FRAME_BYTES, Break, Circuit, CircuitEnd
from p2p_dtfm.testbed.virtual.routers.sockets import JoinedHosts
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.links import Links
from p2p_dtfm.testbed.virtual.wires.streams import VirtualWriter

Result = TypeVar("Result")

DIAL_S = 5.0
"""p2pd gives up a call after so long."""
NO_ROUTE_S = 3.0
"""How long a machine takes to find out that its own network has nobody at a private address."""
RELAYS_LATER_S = 0.5
"""p2pd tries relays so much later, where there are other ways."""
MET = 0.6
"""The share of pairs behind routers that can both open one connection at once."""
ROUND_TRIP_S = 0.02
REFUSED, DROPPED, NO_ROUTE = "connection refused", "i/o timeout", "no route to host"
FIRST_PORT, FIRST_OUTER_PORT = 20_000, 40_000
GONE = (TimeoutError, ConnectionError, EOFError, Unreachable, PeerFault)


class Wiring(Protocol):
    """What the ways in need of the virtual network."""

    links: Links
    hosts: dict[str, VirtualHost]

    def port_of(self, peer_id: str) -> int: ...

    async def shake_hands(self, host: VirtualHost, peer_id: str, deadline_s: float) -> None: ...

    async def open_stream(
        self, host: VirtualHost, peer_id: str, name: str, deadline_s: float
    ) -> VirtualWriter: ...

    def part(self, one: str, other: str) -> None: ...

    def note(self, origin: str, goal: str, what: str, size_bytes: int) -> None: ...


class WaysIn:
    """All ways in of one world. `behind` are the ids of the peers that have a router."""

    def __init__(
        self, network: Wiring, behind: Collection[str], break_off: Break, chance: str
    ) -> None:
        self.circuits: dict[int, Circuit] = {}
        self._chance = chance
        self._opened: dict[tuple[str, str], asyncio.Future[None]] = {}
        """Connections that one end opens, by its own id and the other end's, both behind routers.
        Each lasts until the two have met."""
        self._network = network
        self._behind = frozenset(behind)
        self._break_off = break_off
        self._numbers = itertools.count(1)

    # where everybody is --------------------------------------------------------------------------

    def is_behind(self, peer_id: str) -> bool:
        return peer_id in self._behind

    def own_address(self, peer_id: str) -> str:
        """The peer's address, as its own machine has it."""
        port = self._network.port_of(peer_id)
        place = port - FIRST_PORT + 1
        kind = f"192.168.{place}.2" if self.is_behind(peer_id) else f"9.9.0.{place}"
        return f"/ip4/{kind}/tcp/{port}"

    def seen_address(self, peer_id: str) -> str:
        """The address from which others see the peer's connections come."""
        if not self.is_behind(peer_id):
            return self.own_address(peer_id)
        place = self._network.port_of(peer_id) - FIRST_PORT
        return f"/ip4/9.9.0.{place + 1}/tcp/{FIRST_OUTER_PORT + place}"

    def end_of(self, circuit_relay: str) -> str:
        """The address at the far end of a connection through this relay."""
        return f"{self.seen_address(circuit_relay)}/p2p/{circuit_relay}/p2p-circuit"

    def circuits_by_relay(self) -> Counter[str]:
        """How many live connections each relay carries now."""
        return Counter(circuit.relay for circuit in self.circuits.values() if circuit.is_live)

    # calls ---------------------------------------------------------------------------------------

    def dial(self, host: VirtualHost, peer_id: str, ways: Sequence[str]) -> asyncio.Task[str]:
        """Returns why each way in turn came to nothing; empty: there is a connection. p2pd does the
        calls, though its daemon stand still."""
        return _of_nobody(self._dial(host, peer_id, ways))

    async def _dial(self, host: VirtualHost, peer_id: str, ways: Sequence[str]) -> str:
        loop = asyncio.get_running_loop()
        began_s, causes = loop.time(), list[str]()
        plain = dict.fromkeys(way.removesuffix(f"/p2p/{peer_id}") for way in ways)
        for way in [it for it in plain if not is_relayed(it)]:
            cause = await self._dial_direct(host, peer_id, way)
            if not cause or host.is_linked(peer_id):
                return ""
            causes.append(f"* [{way}] {cause}")
        told = await self._dial_relays(host, peer_id, [it for it in plain if is_relayed(it)])
        if host.is_linked(peer_id):
            return ""
        causes += told
        for cause, after_s in ((DROPPED, DIAL_S), (NO_ROUTE, NO_ROUTE_S)):
            if any(it.endswith(cause) for it in causes):
                await asyncio.sleep(max(0.0, began_s + after_s - loop.time()))
        return "failed to dial: " + " ".join(causes or ["no addresses"])

    async def _dial_direct(self, host: VirtualHost, peer_id: str, way: str) -> str:
        if way != self.seen_address(peer_id):
            return NO_ROUTE if way == self.own_address(peer_id) else REFUSED
        opened = self._opened.get((peer_id, host.peer_id))
        if self.is_behind(peer_id) and (opened is None or not self._meet(host.peer_id, peer_id)):
            await asyncio.sleep(RELAYS_LATER_S)
            return DROPPED
        try:
            await self._network.shake_hands(host, peer_id, DIAL_S)
        except Unreachable as error:
            return REFUSED if error.cause.endswith(REFUSED) else DROPPED
        if opened is not None and not opened.done():
            opened.set_result(None)
        return ""

    def _meet(self, one: str, other: str) -> bool:
        """Whether both routers let in what looks like an answer. Some routers take another port for
        each peer that is called."""
        pair = " ".join(sorted((one, other)))
        return random.Random(f"{self._chance} {pair}").random() < MET

    async def _dial_relays(self, host: VirtualHost, peer_id: str, ways: Sequence[str]) -> list[str]:
        """Tries all relays at once until one leads there. Returns why the others did not."""
        causes = list[str]()
        calls = {_of_nobody(self._dial_relayed(host, peer_id, way)): way for way in ways}
        waiting = set(calls)
        while waiting and not host.is_linked(peer_id):
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            causes += [f"* [{calls[it]}] {it.result()}" for it in calls if it in done]
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return causes

    async def _dial_relayed(self, host: VirtualHost, peer_id: str, way: str) -> str:
        where, _, rest = way.partition("/p2p/")
        relay = rest.partition("/")[0]
        if relay == host.peer_id:
            return "cannot dial a circuit through oneself"
        if relay not in host.linked:
            cause = await self._dial_direct(host, relay, where)
            if cause:
                whole = f"all dials failed * [{where}] {cause}"
                return f"error opening hop stream to relay: failed to dial {relay}: {whole}"
        try:
            async with asyncio.timeout(DIAL_S):
                return await self._ask_relay(host, relay, peer_id)
        except GONE as error:
            return f"error opening relay circuit: {error!r}"

    async def _ask_relay(self, host: VirtualHost, relay: str, peer_id: str) -> str:
        end = await self._network.open_stream(host, relay, HOP_PROTOCOL, DIAL_S)
        assert isinstance(end, CircuitEnd)
        try:
            asked = RelayMessage(HopKind.CONNECT, peer=base58.b58decode(peer_id))
            end.write(encode_hop(asked))
            status = (await read_hop(end.reader)).status
            if end.is_over:  # its answer was read, and came just before its end
                raise ConnectionResetError("the stream was reset")
            if status is not RelayStatus.OK:
                end.close()
                return f"error opening relay circuit: {status.name} ({status.value})"
        except BaseException:
            end.close()
            raise
        number = next(self._numbers)
        note = self._network.note
        circuit = Circuit(number, relay, host.peer_id, peer_id, self._break_off, note)
        self.circuits = {it: held for it, held in self.circuits.items() if held.is_somewhere}
        self.circuits[number] = circuit
        end.write(number.to_bytes(FRAME_BYTES, "big"))
        circuit.begin_at(host, end)
        try:
            is_there = await circuit.stands
        except BaseException:
            circuit.close(host.peer_id)
            raise
        return "" if is_there else "error opening relay circuit: stream reset"

    def take(self, host: VirtualHost, end: CircuitEnd) -> None:
        """Takes a connection to `host` that a relay passes on."""
        _of_nobody(self._take(host, end))

    async def _take(self, host: VirtualHost, end: CircuitEnd) -> None:
        try:
            async with asyncio.timeout(DIAL_S):
                await read_stop(end.reader)
                taken = RelayMessage(StopKind.STATUS, status=RelayStatus.OK)
                end.write(encode_stop(taken))
                hello = await end.reader.readexactly(FRAME_BYTES)
                if end.is_over:
                    return
        except GONE:
            end.close()
            return
        circuit = self.circuits[int.from_bytes(hello, "big")]
        circuit.begin_at(host, end)
        circuit.link(host.peer_id)

        def stand() -> None:
            circuit.link(circuit.caller)
            if not circuit.stands.done():
                circuit.stands.set_result(True)

        circuit.carry(host.peer_id, "hand", FRAME_BYTES, stand)

    # sockets -------------------------------------------------------------------------------------

    async def open_both(self, host: str, port: int) -> JoinedHosts:
        """Opens a connection of the running process's host with the peer behind that router."""
        origin, end = self._caller(), (host, port)
        ends = {far_end(self.seen_address(peer_id)): peer_id for peer_id in sorted(self._behind)}
        goal = ends.get(end)
        if origin is None or goal is None:
            await asyncio.sleep(DIAL_S)
            raise TimeoutError(DROPPED)
        way = (origin.peer_id, goal)
        opened = self._opened[way] = asyncio.get_running_loop().create_future()
        try:
            await opened
        finally:
            if self._opened.get(way) is opened:
                del self._opened[way]
        return JoinedHosts(
            lambda: goal in origin.linked, lambda: self._network.part(origin.peer_id, goal)
        )

    def _caller(self) -> VirtualHost | None:
        process = PROCESS.get()
        return next((it for it in self._hosts() if it.process is process), None)

    async def reach(self, host: str, port: int) -> None:
        """Calls the p2pd at this address with a socket of the running process."""
        caller = self._caller()
        origin = caller.peer_id if caller is not None else ""
        await asyncio.sleep(ROUND_TRIP_S)
        goal = next((it for it in self._hosts() if self._is_at(it.peer_id, host, port)), None)
        if goal is None and not self._is_a_router(host):
            raise ConnectionRefusedError(REFUSED)
        links, is_open = self._network.links, goal is not None
        if goal is not None:
            ways = ((origin, goal.peer_id), (goal.peer_id, origin))
            is_open = not any(links.of(*way).is_cut for way in ways if origin)
        if not is_open:
            await asyncio.sleep(DIAL_S)
            raise TimeoutError(DROPPED)

    def _hosts(self) -> list[VirtualHost]:
        return [host for host in self._network.hosts.values() if not host.is_gone]

    def _is_at(self, peer_id: str, host: str, port: int) -> bool:
        is_open = not self.is_behind(peer_id)
        return is_open and far_end(self.own_address(peer_id)) == (host, port)

    def _is_a_router(self, host: str) -> bool:
        """Whether a router is there, which drops what it has not asked for."""
        ends = [far_end(self.seen_address(peer_id)) for peer_id in sorted(self._behind)]
        return any(end is not None and end[0] == host for end in ends)


def _of_nobody(work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
    """Begins a task of p2pd, which is no process of this world."""
    loop = asyncio.get_running_loop()
    return loop.create_task(work, context=contextvars.Context())
