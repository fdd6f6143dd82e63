"""What strangers may do to a node of the directory in its own protocol."""

import asyncio
import secrets
import time
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.contacts.identity import effort_spent, identity_of_seed
from p2p_dtfm.net.directory.flat_values import FlatSerializer
from p2p_dtfm.net.directory.node import KEYS_LIMIT, DHTProtocol
from p2p_dtfm.net.directory.table import LOOKED_AT_ONCE, RENAMED_S, Entrances
from p2p_dtfm.net.directory.validator import DirectoryValidator
from p2p_dtfm.net.directory.values import (
    Presence,
    presence_key,
    run_key,
    shard_of,
    sign_presence,
    sign_run,
)
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DictionaryDHTValue,
    PeerID,
    dht_pb2,
    get_dht_time,
)
from tests.core.builders import run_spec

P2PD_LIMIT_BYTES = 4 << 20
KEY = DHTID.generate(source="a key")


async def node_on(p2p: Any, client_mode: bool) -> Any:
    return await DHTProtocol.create(
        p2p=p2p,
        node_id=DHTID.generate(),
        bucket_size=20,
        depth_modulo=5,
        num_replicas=5,
        wait_timeout=1,
        client_mode=client_mode,
        record_validator=DirectoryValidator(),
    )


async def _node(monkeypatch: pytest.MonkeyPatch, answers: Any = None) -> Any:
    """A node that calls nobody else, or gets these answers from those it calls."""
    protocol = await node_on(None, client_mode=True)

    async def nobody(*arguments: Any, timeout: float) -> Any:
        raise OSError("nobody is there")

    stub = answers or SimpleNamespace(rpc_ping=nobody, rpc_find=nobody, rpc_store=nobody)
    opened = DHTProtocol.__mro__[1]
    monkeypatch.setattr(opened, "get_stub", lambda self, peer: stub)
    return protocol


def new_peer() -> PeerID:
    return PeerID(b"\x00\x24\x08\x01\x12\x20" + secrets.token_bytes(32))


def _ping(node_id: bytes) -> Any:
    return dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id), validate=False)


def test_a_neighbour_with_an_endless_id_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing 32 KiB as a peer id takes two seconds, and 1 MiB half an hour."""

    async def told(request: Any, timeout: float) -> Any:
        found = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        found.nearest_node_ids.append(DHTID.generate().to_bytes())
        found.nearest_peer_ids.append(b"\xff" * (32 << 10))
        return dht_pb2.FindResponse(results=[found], peer=dht_pb2.NodeInfo())

    async def scenario() -> None:
        node = await _node(monkeypatch, SimpleNamespace(rpc_find=told))
        began_s = time.perf_counter()
        assert await node.call_find(new_peer(), [KEY]) is None
        assert time.perf_counter() - began_s < 0.5

    event_loop.run(scenario())


def test_of_very_many_neighbours_a_few_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async def told(request: Any, timeout: float) -> Any:
        found = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        for number in range(2_000):
            found.nearest_node_ids.append(DHTID(number).to_bytes())
            found.nearest_peer_ids.append(bytes(new_peer().to_bytes()))
        return dht_pb2.FindResponse(results=[found], peer=dht_pb2.NodeInfo())

    async def scenario() -> None:
        node = await _node(monkeypatch, SimpleNamespace(rpc_find=told))
        ((_, nearest),) = (await node.call_find(new_peer(), [KEY])).values()
        assert len(nearest) == node.bucket_size

    event_loop.run(scenario())


def test_very_many_signatures_in_one_answer_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each signature takes a fraction of a millisecond; the answering node may have signed
    thousands."""
    expires_s = float(int(get_dht_time()) + 100)
    found = DictionaryDHTValue()
    run_digest, makers = "aa" * 32, []
    number = 0
    while len(makers) < 400:
        maker = identity_of_seed(number.to_bytes(32, "big"))
        number += 1
        if shard_of(maker.peer_id) == 0:
            makers.append(maker)
    for maker in makers:
        presence = Presence(maker.peer_id, 1, (), run_digest, int(expires_s * 1000))
        value = FlatSerializer.dumps(encode(sign_presence(presence, maker.sign)))
        found.store(base58.b58decode(maker.peer_id), value, expires_s)
    key = DHTID.generate(source=presence_key(run_digest, 0))

    async def told(request: Any, timeout: float) -> Any:
        result = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY)
        result.value, result.expiration_time = FlatSerializer.dumps(found), expires_s
        return dht_pb2.FindResponse(results=[result], peer=dht_pb2.NodeInfo())

    async def scenario() -> None:
        node = await _node(monkeypatch, SimpleNamespace(rpc_find=told))
        longest, before = 0, effort_spent()
        finding = asyncio.create_task(node.call_find(new_peer(), [key]))
        while not finding.done():
            await asyncio.sleep(0)
            longest, before = max(longest, effort_spent() - before), effort_spent()
        ((value, _),) = (await finding).values()
        assert len(value.value.data) == len(makers)
        assert longest <= 2 * LOOKED_AT_ONCE

    event_loop.run(scenario())


def test_who_answers_with_an_impossible_id_has_not_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def told(request: Any, timeout: float) -> Any:
        return dht_pb2.PingResponse(peer=dht_pb2.NodeInfo(node_id=b"\xff" * 21), available=True)

    async def scenario() -> None:
        node = await _node(monkeypatch, SimpleNamespace(rpc_ping=told))
        assert await node.call_ping(new_peer()) is None

    event_loop.run(scenario())


def test_no_answer_is_longer_than_libp2p_passes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """hivemind keeps an answer that is too long for ever, with the task that made it."""

    async def scenario() -> None:
        node = await _node(monkeypatch)
        expires_s = get_dht_time() + 100
        keys = [DHTID.generate(source=str(number)) for number in range(20)]
        for key in keys:
            for number in range(900):
                node.storage.store_subkey(key, str(number), b"v" * 400, expires_s)
        asker = SimpleNamespace(remote_id=new_peer())
        same = [keys[0].to_bytes()] * KEYS_LIMIT
        for asked in (same, [key.to_bytes() for key in keys]):
            request = dht_pb2.FindRequest(keys=asked, peer=dht_pb2.NodeInfo())
            reply = await node.rpc_find(request, asker)
            assert len(reply.results) == len(asked) and reply.ByteSize() < P2PD_LIMIT_BYTES
        assert sum(it.type == dht_pb2.FOUND_DICTIONARY for it in reply.results) >= 5

    event_loop.run(scenario())


def test_what_many_ask_for_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        node, writes = await _node(monkeypatch), 0
        expires_s = get_dht_time() + 100
        write = FlatSerializer.dumps

        def counted(value: object) -> bytes:
            nonlocal writes
            writes += 1
            return bytes(write(value))

        monkeypatch.setattr(FlatSerializer, "dumps", counted)

        async def ask() -> Any:
            request = dht_pb2.FindRequest(keys=[KEY.to_bytes()], peer=dht_pb2.NodeInfo())
            asker = SimpleNamespace(remote_id=new_peer())
            (result,) = (await node.rpc_find(request, asker)).results
            return {k: bytes(v.value) for k, v in FlatSerializer.loads(result.value).data.items()}

        node.storage.store_subkey(KEY, b"one", b"value", expires_s)
        for _ in range(5):
            assert await ask() == {b"one": b"value"}
        assert writes == 1
        node.storage.store_subkey(KEY, b"one", b"other", expires_s + 1)
        node.storage.store_subkey(KEY, b"two", b"value", expires_s)
        assert await ask() == {b"one": b"other", b"two": b"value"}

    event_loop.run(scenario())


def test_who_gives_itself_many_ids_is_one_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        node, peer = await _node(monkeypatch), new_peer()
        expires_s, looked = get_dht_time() + 100, 0
        for number in range(1_000):
            node.storage.store(DHTID.generate(source=number), b"value", expires_s)
        look = node.routing_table.get_nearest_neighbors

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal looked
            looked += 1
            return look(*arguments, **options)

        monkeypatch.setattr(node.routing_table, "get_nearest_neighbors", counted)
        for _ in range(100):
            request = _ping(secrets.token_bytes(20))
            await node.rpc_ping(request, SimpleNamespace(remote_id=peer))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert len(node.routing_table.uid_to_peer_id) == 1 and looked < 10

    event_loop.run(scenario())


def test_a_crowd_of_nodes_takes_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    async def slow(request: Any, timeout: float) -> Any:
        await asyncio.sleep(timeout)

    async def scenario() -> None:
        node = await _node(monkeypatch, SimpleNamespace(rpc_ping=slow, rpc_store=slow))
        for _ in range(3_000):
            request = _ping(secrets.token_bytes(20))
            await node.rpc_ping(request, SimpleNamespace(remote_id=new_peer()))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        table = node.routing_table
        assert len(table.uid_to_peer_id) <= 2 * 20 * len(table.buckets) < 3_000
        assert len(table.peer_id_to_uid) == len(table.uid_to_peer_id)

    event_loop.run(scenario())


def test_nobody_takes_the_id_of_another_node(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        node, honest, node_id = await _node(monkeypatch), new_peer(), DHTID.generate()
        for peer in (honest, new_peer()):
            await node.rpc_ping(_ping(node_id.to_bytes()), SimpleNamespace(remote_id=peer))
            await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        assert node.routing_table.get(node_id=node_id) == honest

    event_loop.run(scenario())


def test_a_node_that_was_started_again_has_its_new_id_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        node, peer, entrances = await _node(monkeypatch), new_peer(), Entrances()
        table = node.routing_table
        assert entrances.enter(table, peer, 0.0)
        table.add_or_update_node(KEY, peer)
        assert not entrances.enter(table, peer, RENAMED_S - 1)
        assert entrances.enter(table, peer, RENAMED_S) and KEY not in table

    event_loop.run(scenario())


def test_a_new_node_is_given_the_runs_that_it_should_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The new node is given nothing that only a value's own peer may bring."""

    async def scenario() -> None:
        node, expires_s = await _node(monkeypatch), get_dht_time() + 100
        node.record_validator.own("aa" * 32)
        (run_key,) = map(DHTID.from_bytes, node.record_validator.run_keys())
        node.storage.store(run_key, b"spec", expires_s)
        node.storage.store_subkey(KEY, "peer", b"presence", expires_s)
        given: list[Any] = []

        async def call_store(peer: PeerID, keys: Any, values: Any, expirations: Any) -> None:
            given.extend(zip(keys, values, strict=True))

        monkeypatch.setattr(node, "call_store", call_store)
        await node.update_routing_table(DHTID.generate(), new_peer())
        await asyncio.sleep(0)
        assert given == [(run_key, b"spec")]

    event_loop.run(scenario())


def test_who_brings_a_run_spec_again_for_a_moment_removes_it_from_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time of a value is no part of what was signed, so anybody may give it one. The run spec
    was gone a moment later, at every node, and newcomers were told of no run."""

    async def scenario() -> None:
        node, expires_s = await _node(monkeypatch), get_dht_time() + 100
        maker = identity_of_seed(bytes(32))
        signed = sign_run(run_spec().canonical_bytes(), maker.peer_id, maker.sign)
        key = DHTID.generate(source=run_key(digest_bytes(signed.payload)))

        async def brought(until_s: float) -> bool:
            request = dht_pb2.StoreRequest(
                keys=[key.to_bytes()],
                subkeys=[node.IS_REGULAR_VALUE],
                values=[FlatSerializer.dumps(encode(signed))],
                expiration_time=[until_s],
                in_cache=[False],
                peer=dht_pb2.NodeInfo(),
            )
            reply = await node.rpc_store(request, SimpleNamespace(remote_id=new_peer()))
            return list(reply.store_ok) == [True]

        assert await brought(expires_s)
        assert not await brought(get_dht_time() + 0.1)
        await asyncio.sleep(0.2)
        assert node.storage.get(key) is not None
        assert await brought(expires_s + 1), "a later time counts"

    event_loop.run(scenario())
