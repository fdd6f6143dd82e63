"""hivemind's DHT behind this peer's door: who asks how much, who brings what, and who is called."""

import asyncio
import contextlib
from typing import Any

from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.whereabouts import Whereabouts
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DHTRefusal,
    PeerID,
    dht_node,
    dht_pb2,
    get_dht_time,
)
from p2p_dtfm.net.hivemind_parts import DHTProtocol as OpenProtocol
from p2p_dtfm.net.libp2p.host import Host

KIND = "directory"
KEYS_LIMIT = 256
"""Of one request."""
BOOTSTRAP_PAUSES_S = (0.5, 1.5)
"""After the first ping, and the second, that nobody has answered or that was refused: where many
start at once a node may have no time for one of them, which need not end for that."""


class DHTProtocol(OpenProtocol):  # type: ignore[misc]
    """Named as hivemind's own: the name is part of what is spoken."""

    serializer = FlatSerializer
    host: Host | None = None
    """Set once the node is made; until then it speaks with its first peers alone."""
    whereabouts: Whereabouts | None = None

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: Any) -> dht_pb2.PingResponse:
        if not self._lets_in(context, 0, 0):
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time())
        return await super().rpc_ping(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: Any) -> dht_pb2.StoreResponse:
        count = len(request.keys)
        if not self._lets_in(context, count, request.ByteSize()):
            return dht_pb2.StoreResponse(store_ok=[False] * count, peer=self.node_info)
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
        count = len(request.keys)
        if not self._lets_in(context, count, request.ByteSize()):
            nothing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            results = [nothing] * min(count, KEYS_LIMIT)
            return dht_pb2.FindResponse(results=results, peer=self.node_info)
        return await super().rpc_find(request, context)

    def _lets_in(self, context: Any, count: int, size_bytes: int) -> bool:
        if count > KEYS_LIMIT:
            return False
        if self.host is None:
            return True
        leave = self.host.door.enter(context.remote_id.to_base58(), KIND, size_bytes)
        if isinstance(leave, str):
            return False
        leave()
        return True

    async def call_ping(
        self, peer: PeerID, validate: bool = False, strict: bool = True
    ) -> DHTID | None:
        if not await self._may_call(peer):
            return None
        for pause_s in BOOTSTRAP_PAUSES_S if validate else ():
            with contextlib.suppress(DHTRefusal):
                if (found := await super().call_ping(peer, validate, strict)) is not None:
                    return found
            await asyncio.sleep(pause_s)
        return await super().call_ping(peer, validate, strict)

    async def call_store(self, peer: PeerID, *arguments: Any, **options: Any) -> Any:
        if not await self._may_call(peer):
            return None
        return await super().call_store(peer, *arguments, **options)

    async def call_find(self, peer: PeerID, keys: Any) -> Any:
        if not await self._may_call(peer):
            return None
        return await super().call_find(peer, keys)

    async def _may_call(self, peer: PeerID) -> bool:
        """One to which there is no connection is looked for where other nodes say that it is."""
        host, peer_id = self.host, peer.to_base58()
        if host is None or await host.calling.is_linked(peer_id):
            return True
        if not await host.calling.may_look_for(peer_id):
            return False
        if self.whereabouts is not None and await self.whereabouts.reach(peer_id):
            return True
        return host.calling.trusts(peer_id)  # where p2pd saw it last


dht_node.DHTProtocol = DHTProtocol
