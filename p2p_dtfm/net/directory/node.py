"""hivemind's DHT behind this peer's door: how much each node asks, what it brings, and whom to
call."""

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.directory.doorway import KEYS_LIMIT, Doorway
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.table import (
    BoundedStub,
    Entrances,
    Storage,
    bound_replacements,
    due_to,
)
from p2p_dtfm.net.directory.whereabouts import Whereabouts
from p2p_dtfm.net.errors import one_line
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DHTRefusal,
    DictionaryDHTValue,
    PeerID,
    dht_node,
    dht_pb2,
    get_dht_time,
)
from p2p_dtfm.net.hivemind_parts import DHTProtocol as OpenProtocol
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.ports import now

KIND = "directory"
ANSWER_KIND = "directory answer"
WRITTEN_KEPT = 16
"""How many dictionaries are kept in the form in which they are sent."""
REPLY_LIMIT_BYTES = 3 << 20
"""p2pd passes on no more than 4 MiB, and hivemind never lets go of a longer message."""
BOOTSTRAP_PAUSES_S = (0.5, 1.5)
"""Pauses after the first and the second ping that got no answer or a refusal. Where many peers
start at once, a node may have no time for one of them, which need not end for that."""

log = logging.getLogger(__name__)


class DHTProtocol(OpenProtocol):  # type: ignore[misc]
    """Has the name of hivemind's own class, because the name is part of the protocol."""

    serializer = FlatSerializer
    host: Host | None = None
    """Set once the node is made. Until then the node speaks with its first peers alone."""
    whereabouts: Whereabouts | None = None

    def __init__(self, *, _initialized_with_create: bool = False) -> None:
        super().__init__(_initialized_with_create=_initialized_with_create)
        self._entrances = Entrances()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._written: dict[DHTID, tuple[int, bytes]] = {}

    @classmethod
    async def create(cls, *arguments: Any, **options: Any) -> "DHTProtocol":
        protocol = await super().create(*arguments, **options)
        assert isinstance(protocol, DHTProtocol)
        protocol.storage = Storage()
        return protocol

    def get_stub(self, peer: PeerID) -> BoundedStub:
        return BoundedStub(super().get_stub(peer), self.bucket_size, self.record_validator)

    async def add_p2p_handlers(self, p2p: Any, *arguments: Any, **options: Any) -> None:
        doorway = Doorway(p2p, self._lets_in, self._blame, self._refusal)
        await super().add_p2p_handlers(doorway, *arguments, **options)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: Any) -> dht_pb2.StoreResponse:
        request.in_cache[:] = [False] * len(request.in_cache)
        validator = self.record_validator
        if validator is None:
            return await super().rpc_store(request, context)
        if self.host is not None:
            validator.door = self.host.door
        validator.sender = context.remote_id.to_base58()
        try:  # which awaits nothing
            return await super().rpc_store(request, context)
        finally:
            validator.sender = None

    async def rpc_find(self, request: dht_pb2.FindRequest, context: Any) -> dht_pb2.FindResponse:
        if len(set(request.keys)) != len(request.keys):  # each key is read once
            return self._refusal(request)
        asker = DHTID.from_bytes(request.peer.node_id)
        keys = list(map(DHTID.from_bytes, request.keys))
        self._spawn(self.rpc_ping(dht_pb2.PingRequest(peer=request.peer), context))
        response = dht_pb2.FindResponse(peer=self.node_info)
        left_bytes = REPLY_LIMIT_BYTES
        for key in keys:
            result = self._found(key, asker, left_bytes)
            left_bytes -= result.ByteSize()
            response.results.append(result)
        if self.host is not None:
            answered_kib = (REPLY_LIMIT_BYTES - left_bytes) >> 10
            self.host.door.spend(context.remote_id.to_base58(), ANSWER_KIND, answered_kib)
        return response

    def _found(self, key: DHTID, asker: DHTID, left_bytes: int) -> dht_pb2.FindResult:
        """What hivemind would answer, as far as there is room."""
        result, held = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND), self.storage.get(key)
        for node_id, peer in self.routing_table.get_nearest_neighbors(
            key, k=self.bucket_size, exclude=asker
        ):
            result.nearest_node_ids.append(node_id.to_bytes())
            result.nearest_peer_ids.append(peer.to_bytes())
        if held is None or left_bytes <= 0:
            return result
        is_many = isinstance(held.value, DictionaryDHTValue)
        value = self._written_form(key, held.value) if is_many else held.value
        if len(value) + result.ByteSize() <= left_bytes:
            result.type = dht_pb2.FOUND_DICTIONARY if is_many else dht_pb2.FOUND_REGULAR
            result.value, result.expiration_time = value, held.expiration_time
        return result

    def _written_form(self, key: DHTID, dictionary: DictionaryDHTValue) -> bytes:
        """The dictionary as it is sent, kept for later answers. Writing one of many entries takes
        tens of milliseconds, and anybody may ask for it. The dates of its entries show whether it
        has changed: an entry replaces another only with a later expiration."""
        form = hash(tuple((it, held.expiration_time) for it, held in dictionary.data.items()))
        before, written = self._written.get(key, (0, b""))
        if before != form or not written:
            written = self.serializer.dumps(dictionary)
            put_newest(self._written, key, (form, written), WRITTEN_KEPT)
        return written

    def _lets_in(self, sender: str, request_type: type, size_bytes: int) -> bool:
        """Whether a call comes in. For a node that asks what is known here, each KiB of the answers
        counts as well: 256 keys in 6 KB are answered with 320 KB of neighbours."""
        if self.host is None:
            return True
        asked = [(KIND, size_bytes)]
        asked += [(ANSWER_KIND, 0)] if request_type is dht_pb2.FindRequest else []
        for kind, asked_bytes in asked:
            leave = self.host.door.enter(sender, kind, asked_bytes)
            if isinstance(leave, str):
                return False
            leave()
        return True

    def _blame(self, sender: str) -> None:
        if self.host is not None:
            self.host.door.blame(sender, KIND)

    def _refusal(self, request: Any) -> Any:
        """An answer that knows nothing, and stores nothing."""
        if isinstance(request, dht_pb2.PingRequest):
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time())
        count = min(len(request.keys), KEYS_LIMIT)
        if isinstance(request, dht_pb2.StoreRequest):
            return dht_pb2.StoreResponse(store_ok=[False] * count, peer=self.node_info)
        nothing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        return dht_pb2.FindResponse(results=[nothing] * count, peer=self.node_info)

    async def call_ping(
        self, peer: PeerID, validate: bool = False, strict: bool = True
    ) -> DHTID | None:
        """Ping a node. A peer that still refuses at the start's last ping is only noted. hivemind
        itself would not begin then, although others let this node in."""
        if not await self._may_call(peer):
            return None
        for pause_s in BOOTSTRAP_PAUSES_S if validate else ():
            with contextlib.suppress(DHTRefusal):
                if (found := await self._ping(peer, validate, strict)) is not None:
                    return found
            await asyncio.sleep(pause_s)
        try:
            return await self._ping(peer, validate, strict)
        except DHTRefusal as error:
            if self.record_validator is None:
                raise
            self.record_validator.turned_away[peer.to_base58()] = one_line(str(error))
            return None

    async def _ping(self, peer: PeerID, validate: bool, strict: bool) -> DHTID | None:
        """Ping a node. One that answers with an impossible id counts as not having answered."""
        try:
            return await super().call_ping(peer, validate, strict)
        except (AssertionError, AttributeError, TypeError, ValueError) as error:
            log.debug("no answer of a node: %r", error)
            return None

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        """Give a new node the run specs that it should keep: all other values only their own peer
        may bring. hivemind would look at all values held here, for each id that anybody makes
        up."""
        table = self.routing_table
        if responded and node_id is not None and node_id not in table:
            if not self._entrances.enter(table, peer_id, now.monotonic_s()):
                return
            keys = self._run_keys() if self._entrances.may_give(now.monotonic_s()) else []
            given = due_to(self, node_id, keys)
            if given:
                self._spawn(self.call_store(peer_id, *zip(*given, strict=True)))
            to_ping = table.add_or_update_node(node_id, peer_id)
            bound_replacements(table, node_id)
            if to_ping is not None:
                self._spawn(self.call_ping(to_ping[1]))
        elif node_id is None or not responded or table.get(node_id=node_id) == peer_id:
            await super().update_routing_table(node_id, peer_id, responded)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _run_keys(self) -> list[DHTID]:
        validator = self.record_validator
        keys = () if validator is None else validator.run_keys()
        return [DHTID.from_bytes(key) for key in keys]

    async def call_store(self, peer: PeerID, *arguments: Any, **options: Any) -> Any:
        if not await self._may_call(peer):
            return None
        return await super().call_store(peer, *arguments, **options)

    async def call_find(self, peer: PeerID, keys: Any) -> Any:
        if not await self._may_call(peer):
            return None
        return await super().call_find(peer, keys)

    async def _may_call(self, peer: PeerID) -> bool:
        """Whether a node may be called. If no connection to it is there, it is looked for where
        other nodes say that it is."""
        host, peer_id = self.host, peer.to_base58()
        if host is None or await host.calling.is_linked(peer_id):
            return True
        if not await host.calling.may_look_for(peer_id):
            return False
        if self.whereabouts is not None and await self.whereabouts.reach(peer_id):
            return True
        return host.calling.trusts(peer_id)  # p2pd then calls where it saw the peer last


dht_node.DHTProtocol = DHTProtocol
