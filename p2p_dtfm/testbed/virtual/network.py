"""The virtual network: who is there, and what passes between any two."""

import asyncio
import contextvars
import itertools
import random
import zlib
from collections.abc import Callable
from functools import partial

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.testbed.virtual.host import VirtualHost
from p2p_dtfm.testbed.virtual.links import PATIENCE_S, Links
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.streams import VirtualWriter

HEAD_BYTES = 64
STREAM_RESET = "stream reset"


class VirtualNetwork:
    """Hosts by peer id."""

    def __init__(self, loop: VirtualLoop, draws: random.Random) -> None:
        self.links = Links(loop, lambda: loop.now_ns, draws)
        self.hosts: dict[str, VirtualHost] = {}
        self.shelf: dict[str, dict[str, object]] = {}
        """What the directory holds."""
        self.on_said: Callable[[str, str, bytes], float | None] | None = None
        """Is told of each call, from whom to whom, before it leaves, and says how many seconds
        later it does, or None: never."""
        self._loop = loop
        self._numbers = itertools.count()
        self._lanes = itertools.count(1)
        self._ports: dict[str, int] = {}

    @property
    def trace(self) -> object:
        return self.links.trace

    def address_of(self, peer_id: str) -> str:
        port = self._ports.setdefault(peer_id, 20_000 + len(self._ports))
        return f"/ip4/127.0.0.1/tcp/{port}"

    def join(self, process: Process, identity: Identity) -> VirtualHost:
        host = VirtualHost(self, process, identity)
        self.hosts[host.peer_id] = host
        return host

    def leave(self, host: VirtualHost) -> None:
        """In order, or because its process was killed: its connections end."""
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
        """Whoever still lives at either end finds out at once, or when the link lets it."""
        for here, there in ((one, other), (other, one)):
            host = self.hosts.get(here)
            if host is None or host.is_gone:
                if host is not None:
                    host.linked.pop(there, None)
                continue
            self.links.carry(there, here, "reset", 0, _breaking(host, there))

    def give_up_if_still_cut(self, one: str, other: str) -> None:
        """A while after a cut. Who sleeps then finds out when its lines are back."""

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
        """By whoever was awake: what either sends over a line that is back is answered so."""
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
        """`reply` is answered, or fails; what is returned forgets the call, and calls it back
        unless it is over."""
        number, lane = next(self._numbers), next(self._lanes)
        asked = host.asked.setdefault(peer_id, {})
        asked[number] = reply
        serving: list[asyncio.Task[None]] = []

        def answer(content: bytes) -> None:
            if not reply.done():
                reply.set_result(content)

        async def serve(other: VirtualHost) -> None:
            content = await other.calls[name](host.peer_id, body)
            what = f"reply {name} {zlib.crc32(content):08x}"
            size = HEAD_BYTES + len(content)
            self.links.carry(peer_id, host.peer_id, what, size, lambda: answer(content), lane)

        def arrive() -> None:
            other = self.hosts.get(peer_id)
            if other is None or other.is_gone or host.peer_id not in other.linked:
                return  # whoever asks hears of the connection's end
            if name not in other.calls:
                return
            serving.append(other.process.begin(serve(other)))
            if self.links.is_doubled(host.peer_id, peer_id):
                serving.append(other.process.begin(serve(other)))

        held: list[asyncio.TimerHandle] = []
        """Of a call that has not left yet."""

        def forget(is_over: bool) -> None:
            asked.pop(number, None)
            if held and held[0].when() > self._loop.now_s:
                held[0].cancel()
            elif not is_over:
                self.links.carry(host.peer_id, peer_id, "cancel", HEAD_BYTES, cancel, lane)

        def cancel() -> None:
            for task in serving:
                task.cancel()

        held_s = 0.0 if self.on_said is None else self.on_said(host.peer_id, peer_id, body)
        if held_s is None:
            return lambda is_over: None  # nobody is there any more to ask
        what = f"call {name} {digest_bytes(body)[:16]}"
        size = HEAD_BYTES + len(body)
        leave = partial(self.links.carry, host.peer_id, peer_id, what, size, arrive, lane)
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
        lane = next(self._lanes)
        mine = self._end(host.peer_id, peer_id, name, lane)

        def arrive() -> None:
            other = self.hosts.get(peer_id)
            is_there = other is not None and not other.is_gone and name in other.streams
            if is_there and other is not None:
                theirs = self._end(peer_id, host.peer_id, name, lane)
                mine.peer, theirs.peer = theirs, mine
                other.open.setdefault(host.peer_id, []).append(theirs)
                other.process.begin(other.serve(host.peer_id, name, theirs))
            self.links.carry(
                peer_id, host.peer_id, "opened", HEAD_BYTES, lambda: told(is_there), lane
            )

        def told(is_there: bool) -> None:
            if not opened.done():
                opened.set_result(is_there)

        self.links.carry(host.peer_id, peer_id, f"open {name}", HEAD_BYTES, arrive, lane)
        await asyncio.wait({opened}, timeout=deadline_s)
        if not opened.done() or not opened.result() or peer_id not in host.linked:
            mine.close()
            cause = "the stream was refused" if opened.done() else f"no answer in {deadline_s:g} s"
            raise Unreachable(peer_id, cause)
        ends = host.open.setdefault(peer_id, [])
        ends[:] = [end for end in ends if not end.is_closing()]
        ends.append(mine)
        return mine

    def _end(self, here: str, there: str, name: str, lane: int) -> VirtualWriter:
        number = next(self._numbers)

        def carry(what: str, size_bytes: int, arrive: Callable[[], None]) -> None:
            self.links.carry(here, there, what, HEAD_BYTES + size_bytes, arrive, lane)

        is_damaged = partial(self.links.is_damaged, here, there)
        return VirtualWriter(number, f"stream {name}", carry, is_damaged)


def _breaking(host: VirtualHost, there: str) -> Callable[[], None]:
    def break_off() -> None:
        host.linked.pop(there, None)
        host.given_up.discard(there)
        for writer in host.open.pop(there, []):
            writer.reset()
        for reply in list(host.asked.pop(there, {}).values()):
            if not reply.done():
                reply.set_exception(Unreachable(there, STREAM_RESET))

    return break_off
