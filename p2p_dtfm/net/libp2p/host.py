"""This peer's libp2p daemon (p2pd): its start, its addresses, its connections and its end."""

import asyncio
import collections
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from p2p_dtfm.net.contacts.addresses import (
    check_listen_address,
    is_loopback,
    is_relayed,
    parse_address,
    usable_addresses,
    ways_to,
)
from p2p_dtfm.net.contacts.calling import NO_WAY, Calling, put_newest
from p2p_dtfm.net.contacts.first_contacts import reach_first_peers
from p2p_dtfm.net.contacts.identity import Identity, is_peer_id
from p2p_dtfm.net.contacts.ports import refuse_taken_ports
from p2p_dtfm.net.door import Door, OpenDoor
from p2p_dtfm.net.errors import NO_ANSWER, NO_CONTENT, P2PD_HAS_ENDED, Unreachable, one_line
from p2p_dtfm.net.hivemind_parts import (
    P2P,
    P2PDaemonError,
    P2PHandlerError,
    PeerID,
    p2pd_pb2,
)
from p2p_dtfm.net.libp2p.around_hivemind import (
    UNREADABLE,
    PendingCalls,
    expect_broken_streams,
    listen_with_room,
    readable,
    remove_stale_sockets,
)
from p2p_dtfm.net.libp2p.descriptors import allow_many_descriptors
from p2p_dtfm.net.libp2p.ended_streams import EndedStreams
from p2p_dtfm.net.libp2p.kept_connections import Silence, keep_known
from p2p_dtfm.net.libp2p.p2pd import P2pd, flags_of, start_p2pd
from p2p_dtfm.net.libp2p.served_calls import ServedCalls
from p2p_dtfm.net.shaping import ShapedWriter, Shaper

Result = TypeVar("Result")
Writer = asyncio.StreamWriter | ShapedWriter
StreamHandler = Callable[[str, asyncio.StreamReader, Writer], Awaitable[None]]
UnaryHandler = Callable[[str, bytes], Awaitable[bytes]]

CLOSE_DEADLINE_S = 5.0
ADDRESSES_LIMIT = 16
MESSAGE_LIMIT_BYTES = 4 << 20
PEERS_REMEMBERED = 4096
CAUSE_LIMIT = 2_000
"""The most characters of the reason why none of a peer's addresses could be dialled."""
_WAITS_TO_DIAL = "dial backoff"
_DIAL_FAILED = "failed to dial"
_NEVER_SENT = (
    "routing: not found",
    _DIAL_FAILED,
    "no addresses",
    "failed to find any peer",
    NO_WAY,
)
CROSSED = "clientHelloMsg when waiting for"
"""The sign of two calls over one pair of ports: the far end begins to talk as well."""
CALLED_WITHIN_S = 1.0
CALLED_POLL_S = 0.1
STREAMS_LIMIT = 4096
STREAMS_LIMIT_PER_PEER = 96

# what hivemind and asyncio raise when p2pd or the connection is gone; uvloop adds RuntimeError
CONNECTION_ERRORS = (
    P2PDaemonError,
    P2PHandlerError,
    OSError,
    EOFError,
    RuntimeError,
)

log = logging.getLogger(__name__)


class Host:
    """One p2pd, in this process's event loop. Made by `start`."""

    def __init__(self, p2pd: P2pd, p2p: P2P, identity: Identity, listens_on_loopback: bool) -> None:
        self.p2p = p2p
        """hivemind's client of p2pd, for the directory."""
        self.identity = identity
        self.peer_id: str = identity.peer_id
        self.lost = asyncio.Event()
        """Set when p2pd has died by itself: nothing works any more, start a new Host."""
        self.shaper: Shaper | None = None
        """Set before streams are opened or served, to live through a scenario's links."""
        self.door: Door = OpenDoor()
        """Asked before anybody is served."""
        self.calling = Calling(self.remote_addresses)
        """Asked before anybody is called."""
        self.found_addresses: tuple[str, ...] = ()
        """Where others were found to reach this peer, full multiaddrs: through relays, or where its
        router forwards a port. Told to others first."""
        self._p2pd = p2pd
        self._listens_on_loopback = listens_on_loopback
        self._closing = False
        self._address_book: dict[str, tuple[str, ...]] = {}
        self._not_dialled: dict[str, str] = {}
        self._streams: collections.Counter[str] = collections.Counter()
        self._ended = EndedStreams()
        control = p2p._client.control
        control._pending_calls = PendingCalls(control._pending_calls)
        control.listen = partial(listen_with_room, control)
        self.calls = ServedCalls(p2p, lambda sender: self.door.is_near(sender))
        self._peer_ids: dict[str, PeerID] = {}
        self._watcher = asyncio.create_task(self._watch(), name="p2pd watcher")
        silence = Silence(self.calling, p2pd.kill)
        keeping = keep_known(p2p, self.connected_peers, lambda it: self.calling.trusts(it), silence)
        self._keeping = asyncio.create_task(keeping, name="kept connections")

    @classmethod
    async def start(
        cls,
        identity_path: Path,
        listen_addresses: Sequence[str],
        announce_addresses: Sequence[str] = (),
        initial_peers: Sequence[str] = (),
        maps_port: bool = True,
    ) -> "Host":
        """Start p2pd and connect to at least one of `initial_peers`, if there are any. `maps_port`:
        whether a router may be asked to forward a port.

        Raises `UserError`: a malformed address, a damaged identity, a port that is taken or a p2pd
        that does not start (exit code 2), or no initial peer that answers within 10 s (6).
        """
        peers = [parse_address(address) for address in initial_peers]
        listen = [check_listen_address(address) for address in listen_addresses]
        announce = [check_listen_address(address) for address in announce_addresses]
        identity = Identity.load_or_create(identity_path)
        allow_many_descriptors()
        remove_stale_sockets()
        expect_broken_streams(asyncio.get_running_loop())
        flags = flags_of(identity_path, listen, announce, MESSAGE_LIMIT_BYTES, maps_port)
        await refuse_taken_ports(listen)
        p2pd, p2p = await start_p2pd(flags, listen)
        on_loopback = any(is_loopback(address) for address in (*listen, *announce))
        host = cls(p2pd, p2p, identity, on_loopback)
        try:
            assert p2p.peer_id.to_base58() == identity.peer_id, "p2pd read another key"
            if peers:
                await reach_first_peers(host, initial_peers)
        except BaseException:
            await host.close()
            raise
        return host

    @property
    def p2pd_pid(self) -> int:
        return self._p2pd.process.pid

    async def addresses(self) -> tuple[str, ...]:
        """Full multiaddrs at which others reach this peer, to be pasted as they are.

        Loopback is left out unless this peer was told to listen there, or has nothing else.
        """
        visible = await self._ask(self.p2p.get_visible_maddrs(latest=True), CLOSE_DEADLINE_S)
        readables = [text for address in visible if (text := readable(address)) is not None]
        texts = list(ways_to(self.peer_id, readables))
        if not self._listens_on_loopback:
            texts = [text for text in texts if not is_loopback(text)] or texts
        return tuple(dict.fromkeys((*self.found_addresses, *texts)))[:ADDRESSES_LIMIT]

    @property
    def is_only_local(self) -> bool:
        """Whether this peer was told to listen on loopback, so that no router is in between."""
        return self._listens_on_loopback

    async def connect(
        self, peer_id: str, addresses: Sequence[str], deadline_s: float, is_chosen: bool = False
    ) -> None:
        """Connect to a peer at any of its addresses. `calling` chooses among them, unless
        `is_chosen` says that it has. Raises `Unreachable`."""
        own_suffix = f"/p2p/{peer_id}"
        addresses = [address.removesuffix(own_suffix) for address in addresses]
        is_trusted = is_chosen or self.calling.trusts(peer_id)
        if not is_trusted:
            if await self.calling.is_linked(peer_id):
                return
            addresses = self.calling.choose(peer_id, addresses)
        usable = usable_addresses(addresses)
        if addresses and not usable:
            raise Unreachable(peer_id, "none of its addresses is well formed")
        await self._let_it_call_first(peer_id)
        before = self._not_dialled.get(peer_id)
        try:
            calling = self.p2p._client.connect(self._peer(peer_id), usable)
            await self._reach(peer_id, calling, deadline_s)
        except Unreachable as failed:
            if not is_trusted and (failed.cause is before or CROSSED in failed.cause):
                self.calling.not_called(addresses)
            raise
        if not is_trusted:
            await self.calling.answered(peer_id)

    async def _let_it_call_first(self, peer_id: str) -> None:
        """Wait a moment for a peer with a smaller id: both may have heard of each other at once.
        Over long round trips their calls cross on the same ports. Each end then takes the other
        for the one that answers, and both calls fail. libp2p tries neither again for five seconds,
        when both try again. At its first peer nobody has heard of this one, so it does not wait."""
        if self.is_only_local or self.peer_id < peer_id or not await self.remote_addresses():
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + CALLED_WITHIN_S
        while loop.time() < end_s and not await self.calling.is_linked(peer_id):
            await asyncio.sleep(CALLED_POLL_S)

    def know(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Remember where a peer says that it is, for when p2pd does not know."""
        known = tuple(addresses)[:ADDRESSES_LIMIT]
        put_newest(self._address_book, peer_id, known, PEERS_REMEMBERED)

    def where(self, peer_id: str) -> tuple[str, ...]:
        """Where a peer said that it is; empty where that is not known."""
        return self._address_book.get(peer_id, ())

    async def disconnect(self, peer_id: str) -> None:
        """Close the connections to a peer, if there are any."""
        with contextlib.suppress(Unreachable):
            request = self.p2p._client.disconnect(self._peer(peer_id))
            await self._reach(peer_id, request, CLOSE_DEADLINE_S)

    async def connected_peers(self) -> tuple[str, ...]:
        """Ids of the peers to which p2pd has a connection."""
        return tuple(sorted(await self.remote_addresses()))

    async def remote_addresses(self) -> dict[str, tuple[str, ...]]:
        """The far ends of each connected peer's connections, direct ones first."""
        found: dict[str, list[str]] = {}
        for info in await self._ask(self.p2p.list_peers(), CLOSE_DEADLINE_S):
            ends = found.setdefault(info.peer_id.to_base58(), [])
            ends.extend(readable(address) or UNREADABLE for address in info.addrs)
        return {peer: tuple(sorted(ends, key=is_relayed)) for peer, ends in found.items()}

    async def direct_address(self, peer_id: str) -> str | None:
        """The far end of a direct connection to a peer; None where it has none."""
        ends = (await self.remote_addresses()).get(peer_id, ())
        return ends[0] if ends and not is_relayed(ends[0]) else None

    async def open_stream(
        self, peer_id: str, name: str, deadline_s: float
    ) -> tuple[asyncio.StreamReader, Writer]:
        """A new stream to the handler `name` of a peer. Raises `Unreachable`."""

        async def open_once() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            opening = self.p2p.call_binary_stream_handler(self._peer(peer_id), name)
            _, reader, writer = await self._reach(peer_id, opening, deadline_s)
            return reader, writer

        return self._shaped(peer_id, *await self._with_address_book(peer_id, open_once, deadline_s))

    def _shaped(
        self, peer_id: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[asyncio.StreamReader, Writer]:
        """A new stream, shaped and watched, so that nothing of it stays once it is closed."""
        shaped: Writer = writer
        if self.shaper is not None:
            reader, shaped = self.shaper.wrap(peer_id, reader, writer)
        self._ended.watch(shaped, writer)
        return reader, shaped

    async def _with_address_book(
        self, peer_id: str, attempt: Callable[[], Awaitable[Result]], deadline_s: float
    ) -> Result:
        """Try again over the known addresses, if nothing can have reached the peer yet."""
        try:
            if not self.calling.trusts(peer_id) and not await self.calling.is_linked(peer_id):
                raise Unreachable(peer_id, NO_WAY)  # p2pd would call wherever it was told
            return await attempt()
        except Unreachable as unreachable:
            addresses = self._address_book.get(peer_id)
            never_sent = any(sign in unreachable.cause for sign in _NEVER_SENT)
            if not addresses or not never_sent:
                raise
        await self.connect(peer_id, addresses, deadline_s)
        return await attempt()

    async def serve_streams(self, name: str, handler: StreamHandler, kind: str = "") -> None:
        """Call `handler(sender, reader, writer)` for each stream that others open to `name`, if the
        door lets in its `kind`."""

        async def serve(
            info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
        ) -> None:
            sender = info.peer_id.to_base58()
            self.calling.heard(sender)
            full = self._streams.total() >= STREAMS_LIMIT
            leave = self.door.enter(sender, kind or name, 0)
            if isinstance(leave, str) or full or self._streams[sender] >= STREAMS_LIMIT_PER_PEER:
                if not isinstance(leave, str):
                    leave()
                writer.close()
                return
            self._streams[sender] += 1
            reader, shaped = self._shaped(sender, reader, writer)
            try:
                await handler(sender, reader, shaped)
            except Exception:
                log.exception("bug in the stream handler %s", name)
            finally:
                leave()
                self._streams[sender] -= 1
                if not self._streams[sender]:
                    del self._streams[sender]
                shaped.close()

        await self._ask(self.p2p.add_binary_stream_handler(name, serve), CLOSE_DEADLINE_S)

    async def serve_calls(self, name: str, handler: UnaryHandler) -> None:
        """Answer unary calls to `name` with `handler(sender, body)`."""

        async def serve(request: bytes, sender: PeerID) -> bytes:
            self.calling.heard(sender.to_base58())
            return await handler(sender.to_base58(), request)

        await self._ask(self.calls.add_unary_handler(name, serve), CLOSE_DEADLINE_S)

    async def call(self, peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
        """One unary call. Raises `Unreachable`."""

        async def call_once() -> bytes:
            return await self._call_once(peer_id, name, body, deadline_s)

        return await self._with_address_book(peer_id, call_once, deadline_s)

    async def _call_once(self, peer_id: str, name: str, body: bytes, deadline_s: float) -> bytes:
        """A call, exactly once.

        hivemind's own `call_unary_handler` cancels its future at a timeout; a reply that arrives
        in the same turn of the loop then ends hivemind's reader, and with it every later call.
        So the call is made here, with a future that is only ever forgotten.
        """
        self._require_alive(peer_id)
        control = self.p2p._client.control
        call_id = uuid.uuid4()
        message = p2pd_pb2.CallUnaryRequest(
            peer=self._peer(peer_id).to_bytes(), proto=name, data=body
        )
        reply: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        control._pending_calls[call_id] = reply
        try:
            control._pending_messages.put_nowait(
                p2pd_pb2.PersistentConnectionRequest(callId=call_id.bytes, callUnary=message)
            )
            await asyncio.wait({reply}, timeout=deadline_s)
        finally:
            control._pending_calls.pop(call_id, None)
            if not reply.done():
                cancel = p2pd_pb2.PersistentConnectionRequest(
                    callId=call_id.bytes, cancel=p2pd_pb2.Cancel()
                )
                control._pending_messages.put_nowait(cancel)
        if not reply.done():
            raise Unreachable(peer_id, f"{NO_ANSWER} {deadline_s:g} s")
        try:
            answer = reply.result()
        except (P2PDaemonError, P2PHandlerError) as error:
            raise Unreachable(peer_id, self._why(peer_id, str(error))) from error
        # the called peer knows the call's name, and may take back a call of its own by that name
        if answer is None:
            raise Unreachable(peer_id, NO_CONTENT)
        return answer

    async def close(self) -> None:
        """End p2pd and wait until it is gone. May be called twice."""
        self._closing = True
        self._watcher.cancel()
        self._keeping.cancel()
        self._fail_pending("this host was closed")
        await self.p2p.shutdown()
        await self._p2pd.stop()

    async def _watch(self) -> None:
        """Take p2pd's death, or that of hivemind's reader of its replies, for the host's."""
        child = asyncio.create_task(self._p2pd.process.wait())
        reader = self.p2p._client.control._read_task
        try:
            await asyncio.wait({child, reader}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            child.cancel()
        if self._closing:
            return
        log.error("the libp2p daemon of this peer has ended unexpectedly")
        self.lost.set()
        self._fail_pending(P2PD_HAS_ENDED)

    def _fail_pending(self, cause: str) -> None:
        for future in list(self.p2p._client.control._pending_calls.values()):
            if not future.done():
                future.set_exception(P2PDaemonError(cause))

    def _peer(self, peer_id: str) -> PeerID:
        known = self._peer_ids.get(peer_id)
        if known is None:
            if not is_peer_id(peer_id):
                raise Unreachable(one_line(peer_id), "this is no peer id")
            if len(self._peer_ids) >= PEERS_REMEMBERED:
                self._peer_ids.clear()
            known = self._peer_ids[peer_id] = PeerID.from_base58(peer_id)
        return known

    def _require_alive(self, peer_id: str) -> None:
        if self.lost.is_set() or self._closing:
            raise Unreachable(peer_id, P2PD_HAS_ENDED)

    async def _reach(self, peer_id: str, request: Awaitable[Result], deadline_s: float) -> Result:
        try:
            self._require_alive(peer_id)
        except Unreachable:
            if asyncio.iscoroutine(request):
                request.close()
            raise
        try:
            async with asyncio.timeout(deadline_s):  # a wait_for that is cancelled may not end
                return await request
        except TimeoutError as error:
            raise Unreachable(peer_id, f"no connection within {deadline_s:g} s") from error
        except CONNECTION_ERRORS as error:
            cause = self._why(peer_id, str(error) or repr(error))
            raise Unreachable(peer_id, cause) from error
        except Exception as error:
            # hivemind's own mistake, or its answer to strange words: it must not end a daemon
            log.warning("unexpected, of a request about %s: %s", peer_id, one_line(repr(error)))
            raise Unreachable(peer_id, one_line(repr(error))) from error

    def _why(self, peer_id: str, cause: str) -> str:
        """The cause of a failed dial. For a while p2pd does not dial again and only says so: then
        the last cause."""
        cause = one_line(cause, CAUSE_LIMIT)
        if _WAITS_TO_DIAL in cause:
            return self._not_dialled.get(peer_id, cause)
        if _DIAL_FAILED in cause:
            put_newest(self._not_dialled, peer_id, cause, PEERS_REMEMBERED)
        return cause

    async def _ask(self, request: Awaitable[Result], deadline_s: float) -> Result:
        """A request to our own p2pd."""
        return await self._reach(self.peer_id, request, deadline_s)
