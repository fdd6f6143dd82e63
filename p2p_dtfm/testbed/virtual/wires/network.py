"""The virtual network: who is there, and what passes between any two."""

import asyncio
import contextvars
import itertools
import random
import zlib
from collections.abc import Callable, Collection
from functools import partial

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.nat.circuit_messages import HOP_PROTOCOL, STOP_PROTOCOL
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.routers.circuits import CircuitEnd
from p2p_dtfm.testbed.virtual.routers.sockets import Sockets
from p2p_dtfm.testbed.virtual.routers.ways_in import FIRST_PORT, WaysIn
from p2p_dtfm.testbed.virtual.wires.host import RelayedWay, VirtualHost
from p2p_dtfm.testbed.virtual.wires.links import CALL, PATIENCE_S, Links
from p2p_dtfm.testbed.virtual.wires.streams import Carry, VirtualWriter

HEAD_BYTES = 64
STREAM_RESET = "stream reset"
NOT_SERVED = "protocols not supported"


class VirtualNetwork:
    """All hosts of a world, by peer id, and what passes between them."""

    def __init__(self, loop: VirtualLoop, draws: random.Random) -> None:
        self.links = Links(loop, lambda: loop.now_ns, draws)
        self.hosts: dict[str, VirtualHost] = {}
        self.shelf: dict[str, dict[str, object]] = {}
        """What the directory holds."""
        self.on_said: Callable[[str, str, bytes], float | None] | None = None
        """Is called with sender, receiver and body of each call before it leaves. It returns how
        many seconds later the call leaves, or None: never."""
        self.ways_in: WaysIn | None = None
        """How peers are called, where some are behind routers."""
        self._loop = loop
        self._numbers = itertools.count()
        self._lanes = itertools.count(1)
        self._ports: dict[str, int] = {}

    @property
    def trace(self) -> object:
        return self.links.trace

    def address_of(self, peer_id: str) -> str:
        if self.ways_in is not None:
            return self.ways_in.own_address(peer_id)
        return f"/ip4/127.0.0.1/tcp/{self.port_of(peer_id)}"

    def port_of(self, peer_id: str) -> int:
        return self._ports.setdefault(peer_id, FIRST_PORT + len(self._ports))

    def put_behind_routers(self, behind: Collection[str], chance: str) -> None:
        """Puts these peers behind routers, before any host joins. Nobody's address is loopback from
        then on. `chance` seeds how the routers behave."""
        self.ways_in = WaysIn(self, behind, _breaking, chance)
        self._loop.sockets = Sockets(self.ways_in)

    def note(self, origin: str, goal: str, what: str, size_bytes: int) -> None:
        """Notes that something has arrived through a relay."""
        self.links.note_arrival(origin, goal, what, size_bytes)

    def join(self, process: Process, identity: Identity) -> VirtualHost:
        host = VirtualHost(self, process, identity)
        self.hosts[host.peer_id] = host
        return host

    def leave(self, host: VirtualHost) -> None:
        """Ends the host's connections, be it that it leaves or that its process was killed."""
        if host.is_closed:
            return
        host.is_closed = True
        for peer_id in list(host.linked):
            self.part(host.peer_id, peer_id)
        if self.hosts.get(host.peer_id) is host:
            del self.hosts[host.peer_id]
        if not host.process.is_dead:  # its own ends, at which tasks may read, end with p2pd
            for peer_id in [*host.open, *host.asked]:
                _breaking(host, peer_id)()

    # connections ---------------------------------------------------------------------------------

    async def shake_hands(self, host: VirtualHost, peer_id: str, deadline_s: float) -> None:
        answer = self._loop.create_future()

        def knock() -> None:
            other = self.hosts.get(peer_id)
            is_there = other is not None and not other.is_gone
            self.links.carry(peer_id, host.peer_id, "hand", HEAD_BYTES, lambda: greet(is_there))

        def greet(is_there: bool) -> None:
            other = self.hosts.get(peer_id)
            if is_there and other is not None and not host.is_gone:
                host.linked[peer_id] = None
                other.linked[host.peer_id] = None
            if not answer.done():
                answer.set_result(is_there)

        self.links.carry(host.peer_id, peer_id, "knock", HEAD_BYTES, knock)
        await asyncio.wait({answer}, timeout=deadline_s)
        if not answer.done():
            raise Unreachable(peer_id, f"no connection within {deadline_s:g} s")
        if not answer.result():
            raise Unreachable(
                peer_id, f"failed to dial: * [{self.address_of(peer_id)}] connection refused"
            )

    def part(self, one: str, other: str) -> None:
        """Ends a connection. Whoever still lives at an end finds out at once, or when the link lets
        it."""
        for here, there in ((one, other), (other, one)):
            host = self.hosts.get(here)
            if host is None or host.is_gone:
                if host is not None:
                    host.linked.pop(there, None)
                continue
            self.links.carry(there, here, "reset", 0, _breaking(host, there))

    def give_up_if_still_cut(self, one: str, other: str) -> None:
        """A while after a cut, both ends give up. One that sleeps finds out when its lines are
        back."""

        def give_up() -> None:
            if not (self.links.of(one, other).is_cut or self.links.of(other, one).is_cut):
                return
            for here, there in ((one, other), (other, one)):
                self.links.forget(here, there)
                if (host := self.hosts.get(here)) is None:
                    continue
                if host.process.is_asleep:
                    host.given_up.add(there)
                else:
                    _breaking(host, there)()

        self._loop.call_later(PATIENCE_S, give_up)

    def find_out_what_was_given_up(self, one: str, other: str) -> None:
        """Tells a peer that slept that the other end has given up, when its line is back: whatever
        is sent over it is answered so."""
        for here, there in ((one, other), (other, one)):
            host = self.hosts.get(here)
            if host is not None and there in host.given_up:
                _breaking(host, there)()

    # calls ---------------------------------------------------------------------------------------

    def ask(
        self,
        host: VirtualHost,
        peer_id: str,
        name: str,
        body: bytes,
        reply: asyncio.Future[bytes | None],
    ) -> Callable[[bool], None]:
        """Sends a call, and sets `reply` or fails it. The function that is returned forgets the
        call. It also cancels the call at the other end, unless the call is over."""
        number, lane = next(self._numbers), next(self._lanes)
        way = _way_of(host, peer_id)
        asked = host.asked.setdefault(_key(peer_id, way), {})
        asked[number] = reply
        there = self._carrying(host.peer_id, peer_id, lane, way)
        back = self._carrying(peer_id, host.peer_id, lane, way)
        serving: list[asyncio.Task[None]] = []

        def answer(content: bytes) -> None:
            if not reply.done():
                reply.set_result(content)

        def refuse() -> None:
            if not reply.done():
                reply.set_exception(Unreachable(peer_id, NOT_SERVED))

        async def serve(other: VirtualHost) -> None:
            content = await other.calls[name](host.peer_id, body)
            what = f"reply {name} {zlib.crc32(content):08x}"
            size = HEAD_BYTES + len(content)
            back(what, size, lambda: answer(content))

        def arrive() -> None:
            other = self.hosts.get(peer_id)
            if other is None or other.is_gone or not other.is_linked(host.peer_id):
                return  # the asker hears of the connection's end
            if name not in other.calls:
                if self.ways_in is not None:  # a peer that trains nothing answers few questions
                    back("not served", HEAD_BYTES, refuse)
                return
            serving.append(other.process.begin(serve(other)))
            if self.links.is_doubled(host.peer_id, peer_id):
                serving.append(other.process.begin(serve(other)))

        held: list[asyncio.TimerHandle] = []
        """The timer of a call that has not left yet."""

        def forget(is_over: bool) -> None:
            asked.pop(number, None)
            if held and held[0].when() > self._loop.now_s:
                held[0].cancel()
            elif not is_over:
                there("cancel", HEAD_BYTES, cancel)

        def cancel() -> None:
            for task in serving:
                task.cancel()

        held_s = 0.0 if self.on_said is None else self.on_said(host.peer_id, peer_id, body)
        if held_s is None:
            return lambda is_over: None  # the asker is gone
        what = f"{CALL}{name} {digest_bytes(body)[:16]}"
        size = HEAD_BYTES + len(body)
        leave = partial(there, what, size, arrive)
        if held_s:
            held.append(self._loop.call_later(held_s, leave, context=contextvars.Context()))
        else:
            leave()
        return forget

    # streams -------------------------------------------------------------------------------------

    async def open_stream(
        self, host: VirtualHost, peer_id: str, name: str, deadline_s: float
    ) -> VirtualWriter:
        opened: asyncio.Future[bool] = self._loop.create_future()
        lane, way = next(self._lanes), _way_of(host, peer_id)
        there = self._carrying(host.peer_id, peer_id, lane, way)
        back = self._carrying(peer_id, host.peer_id, lane, way)
        mine = self._end(host.peer_id, peer_id, name, there)

        def arrive() -> None:
            other = self.hosts.get(peer_id)
            is_there = other is not None and not other.is_gone and self._is_served(other, name)
            if is_there and other is not None:
                theirs = self._end(peer_id, host.peer_id, name, back)
                mine.peer, theirs.peer = theirs, mine
                other.open.setdefault(_key(host.peer_id, way), []).append(theirs)
                self._serve(other, host.peer_id, name, theirs)
            back("opened", HEAD_BYTES, lambda: told(is_there))

        def told(is_there: bool) -> None:
            if not opened.done():
                opened.set_result(is_there)

        there(f"open {name}", HEAD_BYTES, arrive)
        await asyncio.wait({opened}, timeout=deadline_s)
        is_linked = peer_id in host.linked if way is None else way.is_at(host.peer_id)
        if not opened.done() or not opened.result() or not is_linked:
            mine.close()
            cause = "the stream was refused" if opened.done() else f"no answer in {deadline_s:g} s"
            raise Unreachable(peer_id, cause)
        ends = host.open.setdefault(_key(peer_id, way), [])
        ends[:] = [end for end in ends if not end.is_closing()]
        ends.append(mine)
        return mine

    def _is_served(self, host: VirtualHost, name: str) -> bool:
        """Whether the host takes such a stream. p2pd itself takes those in which a relay says who
        calls."""
        return name in host.streams or (self.ways_in is not None and name == STOP_PROTOCOL)

    def _serve(self, host: VirtualHost, sender: str, name: str, end: VirtualWriter) -> None:
        if name == STOP_PROTOCOL and self.ways_in is not None and isinstance(end, CircuitEnd):
            self.ways_in.take(host, end)
        else:
            host.process.begin(host.serve(sender, name, end))

    def _end(self, here: str, there: str, name: str, carry_on: Carry) -> VirtualWriter:
        number = next(self._numbers)

        def carry(what: str, size_bytes: int, arrive: Callable[[], None]) -> None:
            carry_on(what, HEAD_BYTES + size_bytes, arrive)

        is_damaged = partial(self.links.is_damaged, here, there)
        make = CircuitEnd if name in (HOP_PROTOCOL, STOP_PROTOCOL) else VirtualWriter
        return make(number, f"stream {name}", carry, is_damaged)

    def _carrying(self, here: str, there: str, lane: int, way: RelayedWay | None) -> Carry:
        if way is not None:
            return partial(way.carry, here)
        return partial(self.links.carry, here, there, lane=lane)


def _way_of(host: VirtualHost, peer_id: str) -> RelayedWay | None:
    """The circuit to the peer, where there is no direct connection."""
    if peer_id in host.linked or peer_id not in host.circuits:
        return None
    return host.circuits[peer_id][0]


def _key(peer_id: str, way: RelayedWay | None) -> str:
    return peer_id if way is None else way.name


def _breaking(host: VirtualHost, there: str, way: str = "") -> Callable[[], None]:
    """`way` is a circuit's name; without one, the direct connection breaks."""
    key = way or there

    def break_off() -> None:
        host.linked.pop(key, None)
        host.given_up.discard(key)
        for writer in host.open.pop(key, []):
            writer.reset()
        for reply in list(host.asked.pop(key, {}).values()):
            if not reply.done():
                reply.set_exception(Unreachable(there, STREAM_RESET))

    return break_off
