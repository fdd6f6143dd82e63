"""A stranger at the door of three daemons gets nothing, takes no memory, and reaches nobody. Each
attack is a short version of one that worked: tensors of a view that will never be, requests for
invented peers that name a victim, requests for the manifest and the weights, and a directory of
inventions."""

import asyncio
import contextlib
from dataclasses import dataclass
from pathlib import Path

import base58
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p_dtfm.core.messages.agreement_messages import Gather, Heartbeat, JoinRequest
from p2p_dtfm.core.protocol.canonical import decode, digest_bytes, encode
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    LayerTiming,
    PeerRecord,
    Reachability,
    sign_record,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.signed import signing_in
from p2p_dtfm.core.protocol.snapshot import Member, ViewId
from p2p_dtfm.daemon.peers.wire import FollowLayers, Hello, Message, Welcome, pack
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.values import Presence, presence_key, shard_of, sign_presence
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.hivemind_parts import DHTID, MSGPackSerializer, PeerID, get_dht_time
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS, Host
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.streams.bulk import LANES, LaneHello
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, encode_frame
from p2p_dtfm.net.streams.wire import LENGTH
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from tests.e2e.helpers import step_of, takes_part, wait_until, write_endless_spec
from tests.e2e.walking_daemon import MODULE

MIB = 1 << 20
MEMORY_LIMIT_MIB = 100
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]


@dataclass
class Stranger:
    """A host with a key of its own that speaks the wire, and knows one member."""

    host: Host
    control: ControlPlane
    member: str
    run_digest: str
    spec: RunSpec
    peers: tuple[str, ...]

    @classmethod
    async def start(cls, folder: Path, address: str) -> "Stranger":
        host = await Host.start(folder / "stranger.key", LOOPBACK, initial_peers=[address])

        async def answer(sender: str, body: bytes) -> bytes:
            return b""

        control = await ControlPlane(host, answer).ready()
        member = address.rsplit("/", 1)[1]
        hello = pack(1, Hello(PROTOCOL_VERSION, await host.addresses()))
        welcome = decode(await control.call(member, hello, 5.0), Welcome)
        payload = welcome.run_spec.payload
        peers = tuple(peer.peer_id for peer in welcome.peers)
        spec = RunSpec.from_canonical_bytes(payload)
        return cls(host, control, member, digest_bytes(payload), spec, peers)

    async def say(self, message: Message) -> str:
        """What the member says to it: the refusal, or nothing."""
        try:
            await self.control.call(self.member, pack(1, message), 5.0)
        except (Refused, Unreachable) as error:
            return error.cause
        return ""

    def request_for(self, identity: Identity, port: int, padding: int) -> JoinRequest:
        timing = LayerTiming(2_000_000, 4_000_000)
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{identity.peer_id}"
        device = Device("cpu", "x" * padding, 1 << 34, timing, timing, timing)
        record = PeerRecord(
            identity.peer_id, 1, 1, PROTOCOL_VERSION, self.run_digest, device, 0, 0, {},
            (address,), Reachability.DIRECT, Intent.TRAIN,
        )  # fmt: skip
        return JoinRequest(sign_record(record, signing_in(self.run_digest, identity.sign)))

    async def fill_memory(self, lane: str) -> int:
        """Send a tensor of a view far ahead whose end never comes. Returns how many bytes of it
        went through."""
        shape = (16 * MIB,)
        header = FrameHeader(
            10**9, "f" * 64, 1, FrameKind.ACTIVATION, 0, 0, "fp32", "float32", shape
        )
        _, start = encode_frame(header, bytes(64 * MIB))
        sent = 0
        with contextlib.suppress(Unreachable, *CONNECTION_ERRORS):
            reader, writer = await self.host.open_stream(
                self.member, f"/p2p-dtfm/1/bulk/{lane}", 5.0
            )
            hello = encode(LaneHello(2, self.run_digest, lane, 1, 0))
            writer.write(LENGTH.pack(len(hello)) + hello)
            await writer.drain()
            await reader.readexactly(8)
            writer.write(start)
            for _ in range(60):
                writer.write(bytes(MIB))
                await writer.drain()
                sent += MIB
        return sent


def _resident_mib(child: Child) -> int:
    return psutil.Process(child.process.pid).memory_info().rss >> 20


def _refused(child: Child) -> dict[str, int]:
    facts = child.status() or {}
    return {f"{sender} {kind}": count for sender, kind, _, count in facts.get("refused", ())}


async def _theft(stranger: Stranger) -> None:
    exchange = BlobExchange(stranger.host, lambda digest: None)
    with pytest.raises(BlobUnavailable, match="not its place to say of a stranger"):
        await exchange.fetch_bytes(stranger.spec.data.manifest, [stranger.member], 64 * MIB)
    me, view = Member(stranger.host.peer_id, 1), ViewId(2, "f" * 64)
    layers = FollowLayers(view, 1, dict.fromkeys(range(6), -1), False)
    assert "not its place" in await stranger.say(layers)
    for number in (2, 4, 10**6, 2**63 - 2):
        gather = Gather(me, number, True, view, 1, (), (), "0" * 64)
        assert "not its place" in await stranger.say(gather)
    assert "not its place" in await stranger.say(layers), "no attempt has been opened by it"
    assert "not its place" in await stranger.say(Heartbeat(me, 1))


async def _victim(stranger: Stranger) -> int:
    """Requests for invented peers name a third party. Returns the connections that it sees."""
    count = 0

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        count += 1
        await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(knocked, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    own = stranger.host.identity
    await stranger.say(stranger.request_for(own, port, 0))
    for number in range(60):
        invented = Identity(Ed25519PrivateKey.generate())
        await stranger.say(stranger.request_for(invented, port, 40_000 if number % 10 == 0 else 0))
    await asyncio.sleep(5)
    server.close()
    return count


async def _inventions(stranger: Stranger, address: str) -> int:
    """Presences of invented peers that the member takes into the directory."""
    directory = await Directory.start(stranger.host, [address])
    keys, values, expirations, subkeys = [], [], [], []
    for _ in range(200):
        invented = Identity(Ed25519PrivateKey.generate())
        expires_ms = int((get_dht_time() + 60) * 1000)
        presence = Presence(invented.peer_id, 1, (), stranger.run_digest, expires_ms)
        shard = presence_key(stranger.run_digest, shard_of(invented.peer_id))
        keys.append(DHTID.generate(source=shard))
        values.append(MSGPackSerializer.dumps(encode(sign_presence(presence, invented.sign))))
        expirations.append(expires_ms / 1000)
        subkeys.append(base58.b58decode(invented.peer_id))
    stored = await directory._node.protocol.call_store(
        PeerID.from_base58(stranger.member), keys, values, expirations, subkeys
    )
    await directory.close()
    return sum(map(bool, stored or ()))


async def _attack(folder: Path, address: str) -> None:
    stranger = await Stranger.start(folder, address)
    try:
        await _theft(stranger)
        sent = await asyncio.gather(*(stranger.fill_memory(lane) for lane in LANES))
        assert sum(sent) <= len(LANES) * MIB, f"{sent} bytes were taken"
        assert await _inventions(stranger, address) == 0
        assert await _victim(stranger) <= 10
    finally:
        await stranger.host.close()


def test_a_stranger_gets_nothing_and_costs_nobody_a_step(tmp_path: Path) -> None:
    arguments = ["--threads", "1", "--dashboard", "off"]
    with LocalSwarm(tmp_path, arguments, MODULE) as swarm:
        spec = write_endless_spec(tmp_path)
        first, address = swarm.found(["--run", str(spec), "--expect-peers", "3"])
        children = [first, swarm.join(address), swarm.join(address)]
        wait_until(lambda: min(map(step_of, children)) >= 5, "three train")
        before_mib, before_step = _resident_mib(first), step_of(first)
        asyncio.run(asyncio.wait_for(_attack(tmp_path, address), 120))
        assert _resident_mib(first) < before_mib + MEMORY_LIMIT_MIB
        refused = _refused(first)
        assert refused["stranger manifest"] and refused["stranger lane forward"]
        wait_until(lambda: min(map(step_of, children)) > before_step + 5, "all train on")
        late = swarm.join(address)
        wait_until(lambda: takes_part(late), "an honest newcomer is let in")
        assert all(child.running for child in swarm.children)
