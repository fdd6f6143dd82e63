"""Bounds what strangers may do to hivemind's table of nodes. hivemind believes answers as they
come. It takes a peer that gives itself another id in each question for another node each time."""

import asyncio
from collections.abc import Sequence
from typing import Any

from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DHTLocalStorage,
    DHTRecord,
    DictionaryDHTValue,
    PeerID,
    dht_pb2,
)

PEER_ID_LIMIT_BYTES = 64
"""hivemind writes each peer id as text: 4 KiB take 26 ms, and 1 MiB take half an hour."""
RENAMED_S = 60.0
"""How long a node keeps the id by which it came in. Calls to it go by its peer id anyway."""
GIVE_EVERY_S = 0.2
LOOKED_AT_ONCE = 8
"""Signatures that are checked before the event loop has a turn: an answer may hold thousands."""
PEERS_REMEMBERED = 4096


class BoundedStub:
    """Calls to a node. Of its answers no more is read than a correct node says."""

    def __init__(self, stub: Any, neighbours_limit: int, validator: Any) -> None:
        """`validator`: hivemind asks it again later, and it remembers what it has found good."""
        self._stub = stub
        self._neighbours_limit = neighbours_limit
        self._validator = validator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_find(self, request: Any, timeout: float | None = None) -> Any:
        response = await self._stub.rpc_find(request, timeout=timeout)
        if len(response.results) != len(request.keys):
            raise ValueError(f"{len(response.results)} answers to {len(request.keys)} questions")
        for key, result in zip(request.keys, response.results, strict=True):
            self._bound(result)
            if result.type == dht_pb2.FOUND_DICTIONARY and not await self._is_good(key, result):
                result.type, result.value = dht_pb2.NOT_FOUND, b""
        return response

    async def _is_good(self, key: bytes, result: Any) -> bool:
        """Whether a found dictionary is good. Raises `ValueError` for bytes that cannot be read."""
        found = FlatSerializer.loads(result.value)
        if self._validator is None or not isinstance(found, DictionaryDHTValue):
            return True  # hivemind's own check is cheap, or refuses it
        with found.freeze():
            entries = list(found.items())
        for number, (subkey, (value, expires_s)) in enumerate(entries):
            record = DHTRecord(key, FlatSerializer.dumps(subkey), value, expires_s)
            if not self._validator.validate(record):
                return False
            if number % LOOKED_AT_ONCE == 0:
                await asyncio.sleep(0)
        return True

    def _bound(self, result: Any) -> None:
        """Cut the neighbours to the limit. Raises `ValueError` for impossible ones."""
        del result.nearest_node_ids[self._neighbours_limit :]
        del result.nearest_peer_ids[self._neighbours_limit :]
        if any(len(peer) > PEER_ID_LIMIT_BYTES for peer in result.nearest_peer_ids):
            raise ValueError("a neighbour whose peer id is too long")


class Storage(DHTLocalStorage):  # type: ignore[misc]
    """Keeps the value that ends later. hivemind's own storage refuses an earlier end, but then
    drops what it holds once the refused value would have ended. Anybody could bring a run spec
    again with only a moment to live."""

    def store(self, key: Any, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        held = self.data.get(key)
        if subkey is None and held is not None and held.expiration_time >= expiration_time:
            return False
        return bool(super().store(key, value, expiration_time, subkey))


class Entrances:
    """When each peer's node came into the table, and when a new node was given values last."""

    def __init__(self) -> None:
        self._entered_s: dict[PeerID, float] = {}
        self._gave_s = -GIVE_EVERY_S

    def enter(self, table: Any, peer: PeerID, now_s: float) -> bool:
        """Whether a peer's node comes in under an id that the table does not have. It replaces the
        peer's last id, but not again and again."""
        before = table.get(peer_id=peer)
        if before is not None:
            if now_s - self._entered_s.get(peer, -RENAMED_S) < RENAMED_S:
                return False
            del table[before]
        put_newest(self._entered_s, peer, now_s, PEERS_REMEMBERED)
        return True

    def may_give(self, now_s: float) -> bool:
        if now_s - self._gave_s < GIVE_EVERY_S:
            return False
        self._gave_s = now_s
        return True


def due_to(protocol: Any, node_id: DHTID, keys: Sequence[DHTID]) -> list[tuple[DHTID, Any, float]]:
    """The values under these keys that a new node should have, and that this node is responsible
    for. With key and expiration."""
    found = []
    for key in keys:
        if (item := protocol.storage.get(key)) is None:
            continue
        near = protocol.routing_table.get_nearest_neighbors(
            key, protocol.num_replicas, exclude=protocol.node_id
        )
        distances = [neighbour.xor_distance(key) for neighbour, _ in near]
        is_first = not distances or protocol.node_id.xor_distance(key) < distances[0]
        if is_first and (not distances or node_id.xor_distance(key) < distances[-1]):
            found.append((key, item.value, item.expiration_time))
    return found


def bound_replacements(table: Any, node_id: DHTID) -> None:
    """Bound the nodes that wait for room beside a full bucket. Once more wait than it holds, the
    oldest goes."""
    bucket = table.buckets[table.get_bucket_index(node_id)]
    while len(bucket.replacement_nodes) > bucket.size:
        del table[next(iter(bucket.replacement_nodes))]
