"""Each door with real libp2p hosts: what it turns away costs no memory, and calls nobody."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.nat.dial_back import CallBacks
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.streams.bulk import BulkPlane, LaneHello
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, FrameLimits, encode_frame
from p2p_dtfm.net.streams.probing import Probes
from p2p_dtfm.net.streams.wire import LENGTH
from tests.net.net_support import hosts, run, until

RUN = "aa" * 32
MIB = 1 << 20


class _Door:
    """A door that lets in nobody, or only the kinds that are named."""

    def __init__(self, *kinds: str) -> None:
        self.kinds = kinds
        self.asked: list[tuple[str, int]] = []

    def enter(self, sender: str, kind: str, size_bytes: int):
        self.asked.append((kind, size_bytes))
        return (lambda: None) if kind in self.kinds else "not its place to say"

    def is_near(self, sender: str) -> bool:
        return False


def _header(view: int = 1, payload_bytes: int = 4 * MIB) -> FrameHeader:
    shape = (payload_bytes // 4,)
    return FrameHeader(view, "ab", 2, FrameKind.ACTIVATION, 0, 0, "fp32", "float32", shape)


def test_a_call_and_a_stream_that_are_not_let_in_reach_no_handler(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            served: list[str] = []

            async def handler(sender: str, body: bytes) -> bytes:
                served.append(sender)
                return b""

            one.door = door = _Door()
            await ControlPlane(one, handler, name="control").ready()
            deaf = BulkListeners(lambda *_: None, lambda *_: None)
            await BulkPlane(one, RUN, deaf).ready()
            with pytest.raises(Refused, match="not its place"):
                await (await ControlPlane(two, handler).ready()).call(one.peer_id, b"x", 5.0)
            plane = BulkPlane(two, RUN, deaf)
            with pytest.raises(Unreachable, match="no answer to a hello"):
                await plane.send(one.peer_id, "forward", _header(), bytes(4 * MIB))
            assert not served
            assert [kind for kind, _ in door.asked] == ["control", "lane forward"]

    run(scenario())


def test_a_frame_that_cannot_be_is_refused_before_memory_is_taken(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            faults: list[str] = []

            def admit(sender: str, lane: str, header: FrameHeader) -> None:
                if header.view_number > 3:
                    raise PeerFault("a tensor of a view that cannot be")

            plane = BulkPlane(
                one,
                RUN,
                BulkListeners(
                    lambda *_: None,
                    lambda sender, fault: faults.append(fault.cause),
                    admit=admit,
                ),
            )
            await plane.ready()
            reader, writer = await two.open_stream(one.peer_id, "/p2p-dtfm/1/bulk/forward", 5)
            hello = encode(LaneHello(2, RUN, "forward", 1, 0))
            writer.write(LENGTH.pack(len(hello)) + hello)
            await reader.readexactly(8)
            _, start = encode_frame(_header(10**9, 64 * MIB), bytes(64 * MIB))
            writer.write(start)
            await until(lambda: bool(faults), "refused, though nothing of the payload has come")
            assert faults == ["a tensor of a view that cannot be"] and plane.room.total_bytes == 0

    run(scenario())


def test_announced_bytes_are_bounded_and_all_arrive(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            consuming, most, frames = asyncio.Event(), 0, 0

            async def take(sender: str, header: FrameHeader, payload: bytearray) -> None:
                nonlocal most, frames
                most = max(most, plane.room.total_bytes)
                await consuming.wait()
                frames += 1

            frame_limits = FrameLimits(payload_bytes=4 * MIB)
            listeners = BulkListeners(take, lambda *_: None)
            plane = BulkPlane(one, RUN, listeners, BulkLimits(frame_limits, window_bytes=4 * MIB))
            await plane.ready()
            sender = BulkPlane(two, RUN, listeners, BulkLimits(frame_limits, window_bytes=16 * MIB))

            async def flood(lane: str) -> None:
                for _ in range(4):
                    await sender.send(one.peer_id, lane, _header(), bytes(4 * MIB))
                await sender.flush(one.peer_id, lane)

            lanes = ("forward", "backward", "reduce", "state")
            flooding = [asyncio.create_task(flood(lane)) for lane in lanes]
            await until(lambda: plane.room.total_bytes == 8 * MIB, "two frames are in flight")
            await asyncio.sleep(0.3)
            assert plane.room.total_bytes == 8 * MIB, "the others wait"
            consuming.set()
            await asyncio.gather(*flooding)
            assert frames == 16 and most <= 8 * MIB and plane.room.total_bytes == 0

    run(scenario())


def test_a_blob_goes_to_those_who_may_have_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, two, three):
            content = b"weights"
            digest = "8f5ed36bd27a0f8dcd5a3a0d9a6a3b6e" * 2

            def may_have(sender: str, asked: str) -> None:
                if sender != two.peer_id:
                    raise PeerFault("weights: not its place to say", sender)

            await BlobExchange(one, lambda _: content, may_have=may_have).ready()
            for host, cause in ((two, "do not have this digest"), (three, "not its place")):
                with pytest.raises(BlobUnavailable, match=cause):
                    exchange = BlobExchange(host, lambda _: None)
                    await exchange.fetch_bytes(digest, [one.peer_id], MIB)

    run(scenario())


def test_a_prober_that_sends_nothing_makes_room_for_others(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, hog, honest):
            await Probes(one).ready()

            async def hold() -> None:
                while True:
                    reader, writer = await hog.open_stream(one.peer_id, "/p2p-dtfm/1/bandwidth", 5)
                    writer.write(b"?")
                    with contextlib.suppress(EOFError, OSError):
                        await reader.read(8)
                        await reader.read(8)
                    writer.close()

            holding = asyncio.create_task(hold())
            try:
                await asyncio.sleep(0.5)
                probes, began_s = await Probes(honest).ready(), time.monotonic()
                while True:
                    with contextlib.suppress(Refused):
                        assert await probes.probe_bandwidth(one.peer_id) > 0
                        break
                    await asyncio.sleep(0.1)
                assert time.monotonic() - began_s < 6, "once the silent one has had its time"
            finally:
                holding.cancel()

    run(scenario())


@contextlib.asynccontextmanager
async def _victim() -> AsyncIterator[tuple[int, list[int]]]:
    """The port of a third party, and how many connections came there."""
    count = [0]

    async def knocked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count[0] += 1
        await asyncio.sleep(0.05)
        writer.close()

    server = await asyncio.start_server(knocked, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1], count
    finally:
        server.close()


def _stranger_named(port: int, folder: Path, number: int) -> tuple[str, list[str]]:
    peer_id = Identity.load_or_create(folder / f"stranger-{number}").peer_id
    return peer_id, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer_id}"]


def test_nobody_is_made_to_call_a_victim(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, asker), _victim() as (port, count):
            one.calling.trusts = lambda peer_id: False
            await CallBacks(one).ready()
            callbacks = await CallBacks(asker).ready()
            for number in range(40):
                peer_id, addresses = _stranger_named(port, tmp_path, number)
                one.know(peer_id, addresses)
                with pytest.raises(Unreachable):
                    await one.connect(peer_id, addresses, 2.0)
                with pytest.raises(Unreachable):
                    await one.call(peer_id, "/p2p-dtfm/1/control", b"", 2.0)
            for _ in range(5):
                with contextlib.suppress(Refused):
                    await callbacks.ask(one.peer_id, (port,))
            assert count[0] <= 4, "whatever dozens of requests name"

    run(scenario())


def test_who_has_a_connection_is_spoken_to_over_it(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def handler(sender: str, body: bytes) -> bytes:
            return body

        async with hosts(tmp_path, 2) as (one, two), _victim() as (port, count):
            one.calling.trusts = lambda peer_id: False
            await ControlPlane(two, handler).ready()
            plane = await ControlPlane(one, handler).ready()
            one.know(two.peer_id, [f"/ip4/127.0.0.1/tcp/{port}/p2p/{two.peer_id}"])
            assert await plane.call(two.peer_id, b"x", 5.0) == b"x"
            await one.connect(two.peer_id, await two.addresses(), 5.0)
            assert count[0] == 0
            await one.disconnect(two.peer_id)
            await asyncio.sleep(0.2)
            with pytest.raises(Unreachable, match="not come again"):
                await one.connect(two.peer_id, await two.addresses(), 5.0)
            await two.connect(one.peer_id, await one.addresses(), 5.0)
            assert await plane.call(two.peer_id, b"y", 5.0) == b"y"

    run(scenario())


def test_who_names_a_victim_to_p2pd_and_goes_is_not_looked_for(tmp_path: Path) -> None:
    """p2pd learns a peer's addresses from the peer itself, and would call all of them."""

    async def handler(sender: str, body: bytes) -> bytes:
        return body

    async def scenario() -> None:
        async with hosts(tmp_path, 1) as (one,), _victim() as (port, count):
            one.calling.trusts = lambda peer_id: False
            plane = await ControlPlane(one, handler).ready()
            victim, where = f"/ip4/127.0.0.1/tcp/{port}", await one.addresses()
            for number in range(4):
                key = tmp_path / f"key-{number}"
                listen = ["/ip4/127.0.0.1/tcp/0"]
                two = await Host.start(key, listen, [victim], [f"{where[0]}"])
                await ControlPlane(two, handler).ready()
                own = (f"/ip4/127.0.0.1/tcp/{9 + number}/p2p/{two.peer_id}",)
                one.know(two.peer_id, own)
                assert await plane.call(two.peer_id, b"x", 5.0) == b"x"
                await two.close()
                await asyncio.sleep(0.1)
                for _ in range(3):
                    with pytest.raises(Unreachable):
                        await plane.call(two.peer_id, b"x", 2.0)
                assert not await one.calling.may_look_for(two.peer_id)
            assert count[0] <= 1, "one may go at the very moment in which it is spoken to"

    run(scenario())
