"""The directory: peers of a run find one another, and nobody speaks for another peer."""

import asyncio
import logging
from operator import sub
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import base58
import hivemind.dht.node as dht_node
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.protocol.canonical import digest_bytes, encode
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.directory import ASKED_NODES, Directory
from p2p_dtfm.net.directory.lost_nodes import PAUSE_LIMIT_S, LostNodes
from p2p_dtfm.net.directory.node import BOOTSTRAP_PAUSES_S, DHTProtocol
from p2p_dtfm.net.directory.validator import RUNS_LIMIT, DirectoryValidator
from p2p_dtfm.net.directory.values import (
    VALUE_LIMIT_BYTES,
    Presence,
    key_bytes,
    open_presence,
    open_run,
    presence_key,
    run_key,
    shard_of,
    sign_presence,
    sign_run,
)
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    DHTRecord,
    MSGPackSerializer,
    PeerID,
    dht_pb2,
    get_dht_time,
)
from p2p_dtfm.net.libp2p.host import Host
from tests.core.builders import run_spec
from tests.net.net_support import LOOPBACK, hosts, run

SPEC = run_spec().canonical_bytes()
RUN = digest_bytes(SPEC)


async def _joined(peers: list[Host]) -> list[Directory]:
    """All peers know the run, and one of them has published it."""
    first = list(await peers[0].addresses())
    joined = [await Directory.start(host, first if host is not peers[0] else []) for host in peers]
    await joined[0].publish_run(RUN, sign_run(SPEC, peers[0].peer_id, peers[0].identity.sign))
    return joined


async def _presence(host: Host, life: int = 1, run_digest: str = RUN) -> Presence:
    return Presence(host.peer_id, life, await host.addresses(), run_digest)


def test_who_is_asked_directly_answers_or_is_left_out(tmp_path: Path) -> None:
    """A peer that does not answer costs only its own answer; without libp2p nobody answers."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            for host, directory in zip(peers, directories, strict=True):
                assert await directory.publish_presence(await _presence(host))
            nobody = Identity.load_or_create(tmp_path / "nobody.key").peer_id
            asked = [peers[0].peer_id, nobody]
            present = await directories[1].present_at(asked, RUN)
            assert peers[0].peer_id in [presence.peer_id for presence in present]
            peers[1].lost.set()
            assert await directories[1].present_at(asked, RUN) == []

    run(scenario())


def test_what_nobody_expected_of_the_directory_is_in_the_log_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Such an error ends nothing, and may be a mistake of ours: the log has where it happened."""

    async def fails(error: Exception) -> None:
        raise error

    async def scenario() -> None:
        host: Any = SimpleNamespace(peer_id="me", lost=asyncio.Event())
        directory = Directory(host, cast(Any, None), [], DirectoryValidator())
        errors = (TimeoutError(), OSError("reset"), AssertionError("ours"), AssertionError("ours"))
        for error in (*errors, LookupError()):
            with pytest.raises(Unreachable):
                await directory._bounded(fails(error))

    run(scenario())
    kinds = [it.exc_info[0] for it in caplog.records if it.exc_info]
    assert kinds == [AssertionError, LookupError]


def test_a_lookup_asks_few_nodes_and_more_than_hold_the_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            node, widths = directories[1]._node, list[int]()
            crawl = dht_node.traverse_dht

            async def noted(*queries: Any, beam_size: int, **settings: Any) -> Any:
                widths.append(beam_size)
                return await crawl(*queries, beam_size=beam_size, **settings)

            monkeypatch.setattr(dht_node, "traverse_dht", noted)
            await directories[1].present_peers(RUN)
            assert set(widths) == {ASKED_NODES}
            assert node.num_replicas < ASKED_NODES < node.protocol.bucket_size
            for directory in directories:
                await directory.close()

    run(scenario())


def test_peers_of_a_run_see_each_other_and_later_lives(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as peers:
            directories = await _joined(peers)
            for host, directory in zip(peers, directories, strict=True):
                assert await directory.publish_presence(await _presence(host))
            other = run_spec(seed=3)
            other_run = await _presence(peers[0], run_digest=other.digest())
            signed = sign_run(other.canonical_bytes(), peers[0].peer_id, peers[0].identity.sign)
            assert await directories[0].publish_run(other.digest(), signed)
            for directory in directories:
                present = await directory.present_peers(RUN)
                assert [p.peer_id for p in present] == sorted(host.peer_id for host in peers)
                assert all(p.addresses for p in present)
            assert await directories[1].publish_presence(await _presence(peers[1], life=2))
            lives = {p.peer_id: p.life for p in await directories[2].present_peers(RUN)}
            assert lives[peers[1].peer_id] == 2
            assert await directories[0].present_peers("ee" * 32) == []
            assert await directories[0].publish_presence(other_run)
            assert len(await directories[1].present_peers(other.digest())) == 1
            assert await directories[1].refresh()
            for directory in directories:
                await directory.close()

    run(scenario())


def test_two_directories_that_began_apart_become_one(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, other):
            apart = [await Directory.start(host) for host in (one, other)]
            await apart[1].publish_presence(await _presence(other))
            assert await apart[0].present_peers(RUN) == []
            nobody = Identity.load_or_create(tmp_path / "nobody").peer_id
            await apart[0].meet([other.peer_id, nobody])
            await apart[1].publish_presence(await _presence(other, life=2))
            assert [found.life for found in await apart[0].present_peers(RUN)] == [2]
            for directory in apart:
                await directory.close()

    run(scenario())


def test_a_presence_expires_unless_refreshed(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            await directories[1].publish_presence(await _presence(peers[1]), expires_in_s=1.0)
            assert await directories[0].present_peers(RUN)
            await directories[1].close()
            end = get_dht_time() + 10
            while await directories[0].present_peers(RUN):
                assert get_dht_time() < end, "an expired presence is still there"
                await asyncio.sleep(0.05)

    run(scenario())


def test_run_specs_are_found_by_digest_and_survive_their_publisher(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 4) as peers:
            directories = await _joined(peers)
            spec = run_spec(seed=2).canonical_bytes()
            signed = sign_run(spec, peers[1].peer_id, peers[1].identity.sign)
            digest = digest_bytes(spec)
            assert await directories[1].publish_run(digest, signed)
            assert await directories[1].refresh()
            await peers[1].close()
            found = await directories[3].fetch_run(digest)
            assert found is not None and open_run(found, digest) == spec
            assert await directories[3].fetch_run("ab" * 32) is None

    run(scenario())


def test_refused_values_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as peers:
            (directory,) = await _joined(peers)
            spec = encode({"name": "x" * VALUE_LIMIT_BYTES})
            signed = sign_run(spec, peers[0].peer_id, peers[0].identity.sign)
            with caplog.at_level(logging.WARNING):
                assert not await directory.publish_run(digest_bytes(spec), signed)
            assert "refused what was to be published (run)" in caplog.text
            small = sign_run(b"\x80", peers[0].peer_id, peers[0].identity.sign)
            with pytest.raises(PeerFault, match="under the name"):
                await directory.publish_run("ab" * 32, small)

    run(scenario())


def test_one_refusal_is_not_told_but_many_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A node that had to look for the run first refuses a presence, and takes the next one. Here
    all nodes hold a later presence."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            _, directory = await _joined(peers)
            presence = await _presence(peers[1])
            with caplog.at_level(logging.WARNING):
                assert await directory.publish_presence(presence, expires_in_s=80)
                for told in (0, 0, 1, 1):
                    assert not await directory.publish_presence(presence, expires_in_s=20)
                    assert caplog.text.count("(presence)") == told
                assert await directory.publish_presence(presence, expires_in_s=85)
                assert not await directory.publish_presence(presence, expires_in_s=20)
                assert caplog.text.count("(presence)") == 1

    run(scenario())


def _forgeries(folder: Path) -> dict[str, tuple[bytes, bytes | None, bytes, float]]:
    own, other = (Identity.load_or_create(folder / name) for name in ("own", "other"))
    expires = get_dht_time() + 60
    presence = Presence(own.peer_id, 1, (), RUN, int(expires * 1000))
    good = sign_presence(presence, own.sign)
    key = key_bytes(presence_key(RUN, shard_of(own.peer_id)))
    owner, when = base58.b58decode(own.peer_id), presence.expires_ms / 1000
    value = encode(good)
    stolen = msgspec.structs.replace(good, peer_id=other.peer_id)
    for_another = sign_presence(msgspec.structs.replace(presence, peer_id=other.peer_id), own.sign)
    for_another = msgspec.structs.replace(for_another, peer_id=own.peer_id)
    spec = sign_run(b"\x80", own.peer_id, own.sign)
    unknown = msgspec.structs.replace(good, kind="gossip")
    wide = sign_presence(msgspec.structs.replace(presence, addresses=("/x" * 90,) * 16), own.sign)
    return {
        "good": (key, owner, value, when),
        "under another owner": (key, base58.b58decode(other.peer_id), value, when),
        "without an owner": (key, None, value, when),
        "under another run": (key_bytes(presence_key("cd" * 32, 0)), owner, value, when),
        "under an unknown key": (b"\x01" * 20, owner, value, when),
        "longer than signed": (key, owner, value, when + 30),
        "for years": (key, owner, value, when + 1e8),
        "already over": (key, owner, value, when - 1000),
        "changed": (key, owner, value[:-1] + bytes([value[-1] ^ 1]), when),
        "another's statement": (key, owner, encode(stolen), when),
        "about another": (key, owner, encode(for_another), when),
        "of unknown kind": (key, owner, encode(unknown), when),
        "a run under a presence": (key, owner, encode(spec), when),
        "a run under another digest": (key_bytes(run_key(RUN)), None, encode(spec), when),
        "garbage": (key, owner, b"\xc1\xff", when),
        "empty": (key, owner, b"", when),
        "too large": (key, owner, encode(wide) + bytes(VALUE_LIMIT_BYTES), when),
    }


def test_the_validator_takes_the_good_and_refuses_each_forgery(tmp_path: Path) -> None:
    for name, value in _forgeries(tmp_path).items():
        refusal = DirectoryValidator.refusal(*value)
        assert (refusal is None) == (name == "good"), f"{name}: {refusal}"


def test_forgeries_do_not_spread(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            victim, liar = peers[0], directories[1]
            liar._node.protocol.record_validator = None  # this peer checks nothing
            expires = get_dht_time() + 60
            presence = Presence(victim.peer_id, 99, (), RUN, int(expires * 1000))
            forged = sign_presence(presence, peers[1].identity.sign)
            await liar._node.store(
                presence_key(RUN, shard_of(victim.peer_id)),
                encode(forged),
                presence.expires_ms / 1000,
                subkey=base58.b58decode(victim.peer_id),
            )
            assert await directories[0].present_peers(RUN) == []
            with pytest.raises(PeerFault, match="forged"):
                open_presence(forged)

    run(scenario())


def test_a_peer_without_a_directory_is_explained(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (first,):
            addresses = await first.addresses()
            second = await Host.start(tmp_path / "second", LOOPBACK, [], addresses)
            try:
                with pytest.raises(UserError, match="could not join the directory") as error:
                    await Directory.start(second, list(addresses))
                assert error.value.exit_code == 6 and error.value.fixes
            finally:
                await second.close()

    run(scenario())


def test_a_swarm_whose_nodes_lost_each_other_meets_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            for host, directory in zip(peers, directories, strict=True):
                await directory.publish_presence(await _presence(host))
            table = directories[1]._node.protocol.routing_table
            for node_id in list(table.uid_to_peer_id):
                del table[node_id]
            assert not table.uid_to_peer_id
            await directories[1].refresh()
            assert len(await directories[1].present_peers(RUN)) == 2

    run(scenario())


def test_a_node_that_was_started_again_is_met_again(tmp_path: Path) -> None:
    """A bootstrap node keeps its address and loses all else; members have one another meanwhile."""

    async def scenario() -> None:
        key = tmp_path / "bootstrap.key"
        node = await Host.start(key, LOOPBACK)
        at = await node.addresses()
        await Directory.start(node)
        members = [
            await Host.start(tmp_path / f"{number}.key", LOOPBACK, [], at) for number in (0, 1)
        ]
        directories = [await Directory.start(host, at) for host in members]
        await directories[0].meet([members[1].peer_id])
        signed = sign_run(SPEC, members[0].peer_id, members[0].identity.sign)
        await directories[0].publish_run(RUN, signed)
        await directories[0].publish_presence(await _presence(members[0]))
        await node.close()
        for directory in directories:  # calls in vain would have told them so
            table = directory._node.protocol.routing_table
            del table[table[PeerID.from_base58(node.peer_id)]]
        again = await Host.start(key, [at[0].partition("/p2p/")[0]])
        try:
            there = await Directory.start(again)
            await directories[0].refresh()
            assert [it.peer_id for it in await there.present_peers(RUN)] == [members[0].peer_id]
        finally:
            await asyncio.gather(*(host.close() for host in (*members, again)))

    run(scenario())


def test_who_is_gone_for_good_is_called_ever_more_seldom() -> None:
    lost, called = LostNodes(), []
    for now_s in range(0, 3600, 20):
        called += [now_s for _ in lost.due(["gone"], float(now_s))]
    assert called[:4] == [0, 20, 60, 120] and max(map(sub, called[1:], called)) == PAUSE_LIMIT_S
    assert lost.due([], 3600.0) == [], "it is back"
    assert lost.due(["gone"], 3610.0) == ["gone"] and lost.due(["gone"], 3624.0) == []
    assert lost.due(["gone"], 3625.0) == ["gone"]


def test_nodes_that_know_a_third_one_find_each_other(tmp_path: Path) -> None:
    """The nodes that a node has been to tell its address; libp2p does not look for it."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            through = [await peers[1].addresses()]
            late = await Host.start(tmp_path / "late", LOOPBACK, (), through[0])
            try:
                directories.append(await Directory.start(late, list(through[0])))
                late.calling.trusts = lambda peer_id: False
                assert await directories[0].publish_presence(await _presence(peers[0]))
                present = await directories[2].present_peers(RUN)
                assert [it.peer_id for it in present] == [peers[0].peer_id]
                ping = directories[2]._node.protocol.call_ping
                assert await ping(PeerID.from_base58(peers[0].peer_id)), "it is called there"
                assert await late.calling.is_linked(peers[0].peer_id)
                late.calling.trusts = lambda peer_id: True
                late.know(peers[0].peer_id, await peers[0].addresses())
                await late.disconnect(peers[0].peer_id)
                await asyncio.sleep(0.2)
                assert await ping(PeerID.from_base58(peers[0].peer_id)), "a friend is called again"
                await directories[2].close()
            finally:
                await late.close()

    run(scenario())


def test_a_node_that_has_no_time_at_first_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 32 nodes that started at once on two cores one ended, since it had no answer within three
    seconds."""
    refused: list[str] = []
    answer = DHTProtocol.rpc_ping

    async def rpc_ping(self: DHTProtocol, request: Any, context: Any) -> Any:
        if len(refused) < len(BOOTSTRAP_PAUSES_S):
            refused.append(context.remote_id.to_base58())
            if len(refused) == 1:
                raise ValueError("no time")
            return dht_pb2.PingResponse(peer=self.node_info, dht_time=get_dht_time())
        return await answer(self, request, context)

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            monkeypatch.setattr(DHTProtocol, "rpc_ping", rpc_ping)
            directories = await _joined(peers)
            assert refused == 2 * [peers[1].peer_id]
            assert await directories[0].publish_presence(await _presence(peers[0]))
            assert len(await directories[1].present_peers(RUN)) == 1

    run(scenario())


def _junk(number: int, host: Host) -> tuple[bytes, bytes, float]:
    """A value signed under a run's key that is no run spec."""
    signed = sign_run(
        encode({"x": bytes(3000) + bytes([number])}), host.peer_id, host.identity.sign
    )
    key = key_bytes(run_key(digest_bytes(signed.payload)))
    return key, encode(signed), get_dht_time() + 500


def _invented(
    folder: Path, number: int, run_digest: str = RUN
) -> tuple[bytes, bytes, float, bytes]:
    identity = Identity.load_or_create(folder / f"invented-{number}")
    presence = Presence(identity.peer_id, 1, (), RUN, int((get_dht_time() + 60) * 1000))
    value = encode(sign_presence(presence, identity.sign))
    key = key_bytes(presence_key(RUN, shard_of(identity.peer_id)))
    return key, value, presence.expires_ms / 1000, base58.b58decode(identity.peer_id)


async def _bring(
    liar: Directory, target: Host, values: list[tuple[bytes, bytes, float, bytes | None]]
) -> int:
    """How many of these values a node takes from another one."""
    protocol = liar._node.protocol
    stored = await protocol.call_store(
        PeerID.from_base58(target.peer_id),
        [DHTID.from_bytes(key) for key, *_ in values],
        [MSGPackSerializer.dumps(value) for _, value, *_ in values],
        [expires for _, _, expires, _ in values],
        [subkey for *_, subkey in values],
    )
    return sum(map(bool, stored or ()))


def test_presences_that_somebody_else_brings_are_not_stored(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            invented = [_invented(tmp_path, number) for number in range(60)]
            assert await _bring(directories[1], peers[0], invented) == 0
            assert await directories[0].present_peers(RUN) == []
            assert await directories[1].publish_presence(await _presence(peers[1]))
            present = await directories[0].present_at([peers[1].peer_id], RUN)
            assert [presence.peer_id for presence in present] == [peers[1].peer_id]

    run(scenario())


def test_junk_under_run_keys_is_refused_and_run_specs_are_bounded(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as peers:
            directories = await _joined(peers)
            junk = [(*_junk(number, peers[1]), None) for number in range(20)]
            assert await _bring(directories[1], peers[0], junk) == 0
            specs = [run_spec(seed=seed).canonical_bytes() for seed in range(RUNS_LIMIT + 20)]
            runs = [
                (
                    key_bytes(run_key(digest_bytes(spec))),
                    encode(sign_run(spec, peers[1].peer_id, peers[1].identity.sign)),
                    get_dht_time() + 500,
                    None,
                )
                for spec in specs
            ]
            for start in range(0, len(runs), 50):
                await _bring(directories[1], peers[0], runs[start : start + 50])
            validator, storage = directories[0]._validator, directories[0]._node.protocol.storage
            assert validator.runs <= RUNS_LIMIT and len(storage) <= RUNS_LIMIT + 1
            assert DHTID.from_bytes(key_bytes(run_key(RUN))) in storage, "its own run stays"

    run(scenario())


def test_a_presence_needs_a_run_that_is_known() -> None:
    validator, now = DirectoryValidator(), get_dht_time()
    identity = Identity(Ed25519PrivateKey.generate())
    unknown: list[str] = []
    validator.on_unknown_run = unknown.append
    validator.sender = identity.peer_id

    def record(ttl_s: float) -> DHTRecord:
        presence = Presence(identity.peer_id, 1, (), RUN, int((now + ttl_s) * 1000))
        key = key_bytes(presence_key(RUN, shard_of(identity.peer_id)))
        subkey = MSGPackSerializer.dumps(base58.b58decode(identity.peer_id))
        value = MSGPackSerializer.dumps(encode(sign_presence(presence, identity.sign)))
        return DHTRecord(key, subkey, value, presence.expires_ms / 1000)

    assert not validator.validate(record(60)) and unknown == [RUN]
    validator.learn(RUN)
    assert validator.validate(record(60))
    assert validator.stored_bytes > 0
    assert not validator.validate(record(3000)), "expires too far ahead"
