"""Attacks by peers that are no members. Each is a coroutine that takes a stranger and how long it
may go on. It returns what there is to say besides the swarm's own figures."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import base58
import msgpack  # type: ignore[import-untyped]
import msgspec

from benchmarks.attacks.stranger import CALL_S, Stranger, invented
from p2p_dtfm.core.messages.agreement_messages import (
    Active,
    Contribution,
    Gather,
    Heartbeat,
    JoinRequest,
    PresentView,
    Ready,
    Standing,
    Synced,
)
from p2p_dtfm.core.messages.statements import certified, members_digest, stated
from p2p_dtfm.core.protocol.canonical import encode, encode_for_wire
from p2p_dtfm.core.protocol.snapshot import GENESIS, Member, ViewId
from p2p_dtfm.daemon.peers.wire import FollowLayers
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.values import (
    Presence,
    presence_key,
    run_key,
    shard_of,
    sign_presence,
    sign_run,
)
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.hivemind_parts import (
    DHTID,
    MSGPackSerializer,
    PeerID,
    dht_pb2,
    get_dht_time,
)
from p2p_dtfm.net.libp2p.host import CONNECTION_ERRORS
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.streams.bulk import LANES, LaneHello
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, encode_frame
from p2p_dtfm.net.streams.wire import LENGTH
from p2p_dtfm.testbed.crowded_numbers import crowded_numbers

MIB = 1 << 20
NOWHERE = "f" * 64
Notes = dict[str, Any]
Attack = Callable[[Stranger, float], Awaitable[Notes]]


async def standing(one: Stranger, seconds: float) -> Notes:
    """It stands a milliard steps further, unsigned and signed, with a certificate of its own."""
    fake, sign = ViewId(10**6, NOWHERE), one.sign
    ready = stated(Ready(one.me, fake, "e" * 64, members_digest((one.me,))), sign)
    proof = certified(fake, (one.me,), (ready,))
    views = (ViewId(*one.view),)
    said = stated(Standing(one.me, proof, True, 10**9, one.run_digest, views), sign)
    for message in (said, msgspec.structs.replace(said, signature=b"")):
        await one.say_to_all(message)
    return {}


async def numbers(one: Stranger, seconds: float) -> Notes:
    """Views with numbers that nobody has come to, planned and not, from here and from nowhere."""
    present = one.view[0]
    for number in (2**64 - 2, 2**63 - 2, 2**53 - 2, 10**6, present + 1, present + 2, present + 3):
        for planned in (True, False):
            for base in (ViewId(*one.view), GENESIS):
                await one.say_to_all(Gather(one.me, number, planned, base, 1, (), (), "0" * 64))
    return {}


async def active(one: Stranger, seconds: float) -> Notes:
    """Ten views, a milliard on, that it says it has taken over; and that it is synced in each."""
    for number in range(10):
        away = ViewId(10**9 + number, NOWHERE)
        await one.say_to_all(stated(Active(one.me, away, 0), one.sign))
        await one.say_to_all(Active(one.me, away, 0))
        await one.say_to_all(stated(Synced(one.me, away), one.sign))
    return {}


async def padded(one: Stranger, seconds: float) -> Notes:
    """Twenty requests to join, of peers it has made up, 60 KB each."""
    refused = 0
    for _ in range(20):
        request = JoinRequest(one.record_of(invented(), (), 60_000))
        refused += bool(await one.say(request))
    return {"refused_of_20": refused}


async def victim(one: Stranger, seconds: float) -> Notes:
    """300 requests of peers it has made up, whose addresses are a third party's."""
    knocks = 0

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal knocks
        knocks += 1
        await asyncio.sleep(0.1)
        writer.close()

    server = await asyncio.start_server(knocked, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    own = one.host.identity
    address = f"/ip4/127.0.0.1/tcp/{port}/p2p/"
    await one.say(JoinRequest(one.record_of(own, (address + own.peer_id,))))
    for _ in range(300):
        other = invented()
        await one.say(JoinRequest(one.record_of(other, (address + other.peer_id,))))
    await asyncio.sleep(seconds)
    server.close()
    return {"connections_to_victim": knocks}


async def frames(one: Stranger, seconds: float) -> Notes:
    """Halves of tensors of a view that will never be, in sixteen streams of each lane."""
    header = FrameHeader(
        10**9, NOWHERE, 1, FrameKind.ACTIVATION, 0, 0, "fp32", "float32", (16 * MIB,)
    )
    _, start = encode_frame(header, bytes(64 * MIB))

    async def pour(lane: str, stripe: int) -> int:
        sent = 0
        with contextlib.suppress(Unreachable, TimeoutError, *CONNECTION_ERRORS):
            reader, writer = await one.host.open_stream(
                one.member, f"/p2p-dtfm/1/bulk/{lane}", CALL_S
            )
            hello = encode(LaneHello(2, one.run_digest, lane, 5, stripe))
            writer.write(LENGTH.pack(len(hello)) + hello)
            await writer.drain()
            await asyncio.wait_for(reader.readexactly(8), CALL_S)
            writer.write(start)
            for _ in range(63):
                writer.write(bytes(MIB))
                await asyncio.wait_for(writer.drain(), CALL_S)
                sent += MIB
            await asyncio.sleep(seconds)
        return sent

    lanes = [(lane, stripe) for lane in LANES for stripe in range(16)]
    sent = await asyncio.gather(*(pour(*where) for where in lanes))
    return {"mib_taken": sum(sent) >> 20}


async def theft(one: Stranger, seconds: float) -> Notes:
    """The data's manifest, by its public digest, and the states of layers."""
    exchange = BlobExchange(one.host, lambda digest: None)
    took = 0
    with contextlib.suppress(BlobUnavailable):
        took = len(await exchange.fetch_bytes(one.spec.data.manifest, [one.member], 64 * MIB))
    layers = dict.fromkeys(range(6), -1)
    said = []
    for number in (one.view[0], one.view[0] + 2):
        view = ViewId(number, NOWHERE if number > one.view[0] else one.view[1])
        said.append(await one.say(FollowLayers(view, 1, layers, False)))
    return {"bytes_of_manifest": took, "refused": sum(map(bool, said))}


async def presences(one: Stranger, seconds: float) -> Notes:
    """4,000 peers that are not, and junk in the place of run specs, in the directory."""
    directory = await Directory.start(one.host, [])
    protocol = directory._node.protocol
    expires_ms = int((get_dht_time() + 3000) * 1000)

    async def store(entries: list[tuple[str, object, bytes | None]]) -> int:
        keys = [DHTID.generate(source=key) for key, _, _ in entries]
        values = [MSGPackSerializer.dumps(encode(value)) for _, value, _ in entries]
        until = [expires_ms / 1000] * len(entries)
        taken = 0
        for peer_id in one.peers:
            with contextlib.suppress(Exception):  # a refusal by silence is one as well
                stored = await asyncio.wait_for(
                    protocol.call_store(
                        PeerID.from_base58(peer_id),
                        keys,
                        values,
                        until,
                        [subkey for _, _, subkey in entries],
                    ),
                    2 * CALL_S,
                )
                taken += sum(map(bool, stored or ()))
        return taken

    def false_presence() -> tuple[str, object, bytes]:
        who = invented()
        presence = Presence(
            who.peer_id, 1, (f"/ip4/127.0.0.1/tcp/9/p2p/{who.peer_id}",), one.run_digest, expires_ms
        )
        key = presence_key(one.run_digest, shard_of(who.peer_id))
        return key, sign_presence(presence, who.sign), base58.b58decode(who.peer_id)

    taken = 0
    for _ in range(40):
        taken += await store([false_presence() for _ in range(100)])
    junk = sign_run(bytes(3000), one.host.peer_id, one.host.identity.sign)
    taken_junk = await store([(run_key("0" * 63 + f"{n:x}"), junk, None) for n in range(16)])
    await directory.close()
    return {"presences_taken": taken, "junk_taken": taken_junk}


async def half_open(one: Stranger, seconds: float) -> Notes:
    """600 streams on which nothing comes, over one connection."""
    kept: list[Any] = []
    for number in range(600):
        lane = sorted(LANES)[number % len(LANES)]
        with contextlib.suppress(Unreachable, TimeoutError, *CONNECTION_ERRORS):
            kept.append(await one.host.open_stream(one.member, f"/p2p-dtfm/1/bulk/{lane}", 2.0))
    await asyncio.sleep(seconds)
    for _, writer in kept:
        writer.close()
    return {"opened": len(kept)}


async def oversize(one: Stranger, seconds: float) -> Notes:
    """Calls of one and of four MiB, and a hundred of noise."""
    answers = 0
    for body in (bytes(1 << 20), bytes((4 << 20) - 200), *(bytes([n]) * 900 for n in range(100))):
        with contextlib.suppress(Unreachable, TimeoutError, *CONNECTION_ERRORS):
            await one.host.call(one.member, "/p2p-dtfm/1/control", body, CALL_S)
            answers += 1
    return {"answered": answers}


async def crowded(one: Stranger, seconds: float) -> Notes:
    """Forty messages of 207 KB, whose numbers are chosen so that reading them takes long."""
    layers = dict.fromkeys(crowded_numbers(), 0)
    body = encode_for_wire([1, FollowLayers(ViewId(*one.view), 1, layers, False)])
    refused = 0
    for _ in range(40):
        try:
            await one.control.call(one.member, body, CALL_S)
        except Refused:
            refused += 1
        except Unreachable:
            continue
    return {"bytes": len(body), "refused": refused}


async def nested(one: Stranger, seconds: float) -> Notes:
    """2 KB for the directory: dictionaries within dictionaries."""
    directory = await Directory.start(one.host, [])
    protocol = directory._node.protocol
    value = msgpack.packb([None, 0, []])
    for _ in range(240):
        value = msgpack.packb([msgpack.ExtType(0x50, value), 0, []])
    value, stored = msgpack.packb(msgpack.ExtType(0x50, value)), 0
    for peer_id in one.peers:
        request = dht_pb2.StoreRequest(
            keys=[DHTID.generate().to_bytes()],
            subkeys=[protocol.IS_REGULAR_VALUE],
            values=[value],
            expiration_time=[get_dht_time() + 60],
            in_cache=[False],
            peer=protocol.node_info,
        )
        with contextlib.suppress(Exception):  # a refusal by silence is one as well
            stub = protocol.get_stub(PeerID.from_base58(peer_id))
            stored += sum((await asyncio.wait_for(stub.rpc_store(request), CALL_S)).store_ok)
    await directory.close()
    return {"bytes": len(value), "stored": stored}


async def lockout(one: Stranger, seconds: float) -> Notes:
    """It is agreed on as a newcomer, says Ready to nothing true, and is never synced."""

    async def beat() -> None:
        while True:
            await one.say_to_all(Heartbeat(one.me, 1))
            await asyncio.sleep(0.5)

    beating = asyncio.create_task(beat())
    asked = await one.take_part(max(seconds, 15), lambda gather: _empty(one, gather), ready=False)
    beating.cancel()
    return {"asked": asked}


async def another_plan(one: Stranger, seconds: float) -> Notes:
    """A newcomer's Ready names a plan that nobody has computed."""
    asked = await one.take_part(max(seconds, 15), lambda gather: _empty(one, gather), ready=True)
    return {"asked": asked}


def _empty(one: Stranger, gather: Gather) -> Contribution:
    record = one.record_of(one.host.identity, one.addresses)
    return Contribution(one.me, gather.number, record, None, 0, {}, ())


def _nonsense(kind: str) -> Attack:
    def make(one: Stranger, gather: Gather) -> Contribution:
        honest = _empty(one, gather)
        change: dict[str, Any] = {
            "layers": {"held": {10**6: 5, 3: 7}},
            "versions": {"held": dict.fromkeys(range(200), 2**63 - 1)},
            "step": {"step": 2**62},
            "below": {"step": -(2**62)},
            "view": {
                "step": 10**9,
                "present": PresentView(ViewId(*one.view), (one.me, Member("zzz", 1)), None),
            },
            "lineage": {
                "step": 10**9,
                "held": dict.fromkeys(range(6), 10**9),
                "lineages": {10**9: NOWHERE},
            },
        }[kind]
        return msgspec.structs.replace(honest, **change)

    async def attack(one: Stranger, seconds: float) -> Notes:
        asked = await one.take_part(max(seconds, 12), lambda gather: make(one, gather), True)
        return {"asked": asked}

    attack.__doc__ = f"A newcomer's contribution with an impossible {kind}."
    return attack


BY_STRANGERS: dict[str, Attack] = {
    "standing": standing,
    "numbers": numbers,
    "active": active,
    "padded": padded,
    "victim": victim,
    "frames": frames,
    "theft": theft,
    "presences": presences,
    "half-open": half_open,
    "oversize": oversize,
    "crowded": crowded,
    "nested": nested,
    "lockout": lockout,
    "another-plan": another_plan,
    **{
        f"nonsense-{kind}": _nonsense(kind)
        for kind in ("layers", "versions", "step", "below", "view", "lineage")
    },
}
"""By the name that the command takes."""
