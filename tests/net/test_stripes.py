"""Lanes of several streams: whole frames, bounds, one failure for all, and when to grow."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.direct.kernel_figures import KernelFigures, figures_of
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.shaping import Shape, ShapedLink, ShapedPeer, Shaper
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import STRIPES_LIMIT, BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import (
    PART_BYTES,
    FrameHeader,
    FrameKind,
    FrameLimits,
    parse_header,
)
from p2p_dtfm.net.streams.reassembly import Reassembly
from p2p_dtfm.net.streams.stripes import Growth, Lane
from tests.net.net_support import hosts, run, until

MIB = 1 << 20


def _header(payload_bytes: int, index: int = 0) -> FrameHeader:
    shape = (payload_bytes // 4,)
    return FrameHeader(1, "ab", 2, FrameKind.ACTIVATION, index, 0, "fp32", "float32", shape)


def _part(size: int, frame: int, part: int, index: int = 0) -> FrameHeader:
    header = msgspec.structs.replace(_header(size, index), payload_bytes=size)
    return msgspec.structs.replace(header, frame=frame, part=part)


class _Receiver:
    def __init__(
        self, host: Host, window_bytes: int = 64 * MIB, payload_bytes: int = 32 * MIB
    ) -> None:
        self.frames: dict[int, bytes] = {}
        self.faults: list[PeerFault] = []
        self.lost: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.plane = BulkPlane(
            host,
            "aa" * 32,
            BulkListeners(
                self._take,
                lambda sender, fault: self.faults.append(fault),
                lambda peer, lane, error: self.lost.append(lane),
            ),
            BulkLimits(FrameLimits(payload_bytes=payload_bytes), window_bytes=window_bytes),
        )

    async def _take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        await self.gate.wait()
        if header.index == 666:
            raise PeerFault("nobody asked for this tensor")
        assert header.index not in self.frames
        self.frames[header.index] = bytes(payload)


async def _striped(plane: BulkPlane, peer_id: str, count: int) -> Lane:
    await plane.send(peer_id, "reduce", _header(4, 10_000), bytes(4))
    await plane.flush(peer_id, "reduce")
    lane = plane._outgoing[peer_id, "reduce"]
    await lane._grow(count)
    assert len(lane.stripes) == count
    return lane


def test_large_and_small_frames_arrive_whole_over_many_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Receiver(one).plane, _Receiver(two)
            await b.plane.ready()
            lane = await _striped(a, two.peer_id, STRIPES_LIMIT)
            sizes = [0, 4, 400_000, 2 * PART_BYTES, 3 * MIB + 4, 9 * MIB - 4, PART_BYTES, 5 * MIB]
            payloads = [os.urandom(size) for size in sizes]
            await asyncio.gather(
                *(
                    a.send(two.peer_id, "reduce", _header(len(payload), index), payload)
                    for index, payload in enumerate(payloads)
                )
            )
            await a.flush(two.peer_id, "reduce")
            assert {index: b.frames[index] for index in range(len(payloads))} == dict(
                enumerate(payloads)
            )
            assert lane.unacknowledged_bytes == 0
            assert all(stripe.load_bytes == 0 for stripe in lane.stripes)
            (incoming,) = b.plane._incoming.lanes.values()
            assert incoming.reassembly.held_bytes == 0

    run(scenario())


def test_a_receiver_that_waits_bounds_what_is_out_over_all_streams(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a = _Receiver(one, 4 * MIB).plane
            b = _Receiver(two, 4 * MIB, payload_bytes=4 * MIB)
            await b.plane.ready()
            lane = await _striped(a, two.peer_id, 4)
            b.gate.clear()
            sent = []

            async def flood() -> None:
                for index in range(24):
                    size = 2 * MIB
                    await a.send(two.peer_id, "reduce", _header(size, index), bytes(size))
                    sent.append(index)

            flooding = asyncio.create_task(flood())
            await until(lambda: bool(sent), "the first frame is written")
            await asyncio.wait({flooding}, timeout=0.5)
            (incoming,) = b.plane._incoming.lanes.values()
            assert not flooding.done()
            assert incoming.reassembly.held_bytes <= 4 * MIB
            assert lane.unacknowledged_bytes <= 4 * MIB
            assert len(sent) <= 5
            b.gate.set()
            await asyncio.wait_for(flooding, 20)
            await a.flush(two.peer_id, "reduce")
            assert len(b.frames) == 25

    run(scenario())


def test_a_refused_frame_ends_all_streams_once_and_the_lane_opens_again(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Receiver(one), _Receiver(two)
            await b.plane.ready()
            await _striped(a.plane, two.peer_id, 4)
            size = 4 * MIB
            with pytest.raises(Refused, match="nobody asked"):
                await a.plane.send(two.peer_id, "reduce", _header(size, 666), bytes(size))
                await a.plane.flush(two.peer_id, "reduce")
            await a.plane.send(two.peer_id, "reduce", _header(size, 1), bytes(size))
            await a.plane.flush(two.peer_id, "reduce")
            assert len(b.frames[1]) == size
            assert [fault.cause for fault in b.faults] == ["nobody asked for this tensor"]
            assert not b.lost and not a.faults

    run(scenario())


def test_nothing_follows_half_a_part_where_another_stream_has_failed(tmp_path: Path) -> None:
    """A failed stream's reason is waited for until the lane is given up. What was sent meanwhile
    completed the part, and its receiver took an honest sender for one whose checksums are wrong."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Receiver(one).plane, _Receiver(two)
            await b.plane.ready()
            lane = await _striped(a, two.peer_id, 2)
            fails, stays = (cast(Any, stripe.wire) for stripe in lane.stripes)
            is_halfway, write_piece, pieces = asyncio.Event(), stays._write_piece, []

            async def fail(*frame: Any) -> None:
                await is_halfway.wait()
                await asyncio.sleep(0.1)
                raise ConnectionResetError("this one alone")

            async def stop_after_the_first_piece(*piece: Any) -> None:
                pieces.append(piece)
                if len(pieces) == 2:
                    is_halfway.set()
                    await asyncio.Event().wait()
                await write_piece(*piece)

            fails.write_frame, stays._write_piece = fail, stop_after_the_first_piece
            large = asyncio.create_task(
                a.send(two.peer_id, "reduce", _header(MIB, 1), os.urandom(MIB))
            )
            await is_halfway.wait()
            lane.stripes[0].load_bytes += MIB  # the small frame is to wait behind the half part
            small = a.send(two.peer_id, "reduce", _header(PART_BYTES, 2), bytes(PART_BYTES))
            ends = await asyncio.gather(large, small, return_exceptions=True)
            assert all(isinstance(end, Unreachable) for end in ends), ends
            await until(lambda: bool(b.lost), "the receiver hears of the end")
            assert not b.faults and set(b.frames) == {10_000}

    run(scenario())


def test_a_long_round_trip_makes_a_busy_lane_grow_until_that_does_not_help(tmp_path: Path) -> None:
    """A lane judges by its rate. Where others keep the machine busy, the rate of one lane may rise
    by chance each time that it has grown, so that lane goes on to the most streams. Three don't. A
    line at twice the rate, over half the way, was faster than a machine that others kept busy."""
    as_shaped = pytest.approx(20_000_000, rel=0.3)

    async def one_lane(folder: Path) -> tuple[int, float, float | None]:
        """How many streams a new lane ends with, its round trip, and what it tells of its line."""
        async with hosts(folder, 2) as (one, two):
            ids = one.peer_id, two.peer_id
            ways = (ids, ids[::-1])
            links = tuple(ShapedLink(*way, 40_000_000, 20_000_000) for way in ways)
            peers = tuple(ShapedPeer(name, at) for name, at in zip("ab", ids, strict=True))
            for host in (one, two):
                host.shaper = Shaper(Shape("test", peers, links), host.peer_id)
            a, b = _Receiver(one).plane, _Receiver(two)
            await b.plane.ready()
            for first in (0, 30, 60, 90):  # a machine that others keep busy is slower than its line
                for index in range(first, first + 30):
                    await a.send(two.peer_id, "state", _header(2 * MIB, index), bytes(2 * MIB))
                await a.flush(two.peer_id, "state")
                if (estimate := a.link_estimate(two.peer_id)) == as_shaped:
                    break
            lane = a._outgoing[two.peer_id, "state"]
            return len(lane.stripes), lane.round_trip_s, estimate

    async def scenario() -> None:
        for attempt in ("first", "second", "third"):
            streams, round_trip_s, estimate = await one_lane(tmp_path / attempt)
            assert streams >= 2
            assert round_trip_s == pytest.approx(0.09, abs=0.04)
            if streams <= 8 and estimate == as_shaped:
                return
        raise AssertionError(f"{streams} streams, and {estimate} bytes a second: three times")

    run(scenario(), 120.0)


def test_growth_goes_on_while_it_helps() -> None:
    growth, now_s, decisions = Growth(), 0.0, []
    for rate in (10e6, 19e6, 18e6, 30e6, 31e6, 29e6, 60e6):
        growth.began(now_s)
        now_s += 0.6
        growth.ended(now_s, int(rate * 0.6))
        decisions.append(growth.should_grow(0.5, True))
    assert decisions == [True, True, True, True, True, False, False]


def test_lines_that_nothing_but_the_way_holds_back_stay_as_many_as_they_are() -> None:
    def decisions(rates: tuple[float, ...], held_back: list[bool | None]) -> list[bool]:
        growth, now_s, found = Growth(), 0.0, []
        for rate, held in zip(rates, held_back, strict=True):
            growth.began(now_s)
            now_s += 0.6
            growth.ended(now_s, int(rate * 0.6))
            found.append(growth.should_grow(0.5, True, lambda held=held: held))
        return found

    fills = (20e6, 80e6, 120e6, 121e6, 122e6, 120e6)
    assert not any(decisions(fills, [True, True, False, False, False, False])), "it fills the way"
    lossy = (20e6, 30e6, 30e6, 30e6, 30e6, 55e6, 56e6)
    assert decisions(lossy, [True] * 7) == [False, False, False, False, True, True, True]
    twice = [True, True, False, True, True, False, True]
    assert not any(decisions((20e6, 30e6, 30e6, 30e6, 30e6, 30e6, 30e6), twice))
    assert decisions(lossy, [None] * 7) == [True, True, True, False, False, False, False]


def test_the_kernel_says_what_holds_a_connection_back() -> None:
    before = KernelFigures(0.1, 9_000, 5, False, 10.0, 1.0)
    assert not KernelFigures(0.1, 19_000, 5, False, 11.0, 1.4).is_held_back_since(before)
    assert KernelFigures(0.1, 19_000, 5, False, 11.0, 1.6).is_held_back_since(before), "a buffer"
    assert KernelFigures(0.1, 19_000, 6, False, 11.0, 1.0).is_held_back_since(before), "a loss"
    assert not KernelFigures(0.1, 19_000, 6, True, 11.0, 1.0).is_held_back_since(before)
    assert KernelFigures(0.1, 19_000, 16, True, 11.0, 1.0).is_held_back_since(before), "many"


def test_a_reader_that_takes_nothing_holds_its_sender_back() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver = server.accept()[0]
        with sender, receiver:
            sender.sendall(b"x")
            assert receiver.recv(1) == b"x"
            before = figures_of(sender)
            sender.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                while True:
                    sender.send(bytes(MIB))
            time.sleep(0.1)
            after = figures_of(sender)
            assert before is not None and after is not None
            assert before.round_trip_s and before.round_trip_s < 0.1
            assert after.is_held_back_since(before)
        assert figures_of(sender) is None, "it is closed"


def test_a_kernel_that_counts_nothing_says_nothing() -> None:
    """gVisor's kernel has a `tcp_info` of full length with little in it. To a lane over a long way
    its zeros were the shortest round trip that there is, and the lane never grew."""

    class Sandboxed:
        def getsockopt(self, level: int, option: int, size_bytes: int) -> bytes:
            if option == socket.TCP_INFO:
                info = bytearray(size_bytes)
                info[68:72] = (100_000).to_bytes(4, sys.byteorder)
                return bytes(info)
            return b"cubic".ljust(size_bytes, b"\0")

    assert figures_of(cast(Any, Sandboxed())) is None


def test_what_the_buffers_take_at_once_says_nothing() -> None:
    growth = Growth()
    for at_s in range(1000):
        growth.began(float(at_s))
        growth.ended(at_s + 0.001, MIB)
    assert not growth.should_grow(0.5, True)


def test_parts_that_do_not_fit_are_faults() -> None:
    async def scenario() -> None:
        size = 2 * PART_BYTES + 8
        parts = Reassembly(64 * MIB)
        assert await parts.add(_part(size, 1, 0), bytearray(PART_BYTES)) is None
        with pytest.raises(PeerFault, match="twice"):
            await parts.add(_part(size, 1, 0), bytearray(PART_BYTES))
        with pytest.raises(PeerFault, match="different tensors"):
            await parts.add(_part(size, 1, 1, index=5), bytearray(PART_BYTES))
        assert await parts.add(_part(size, 1, 2), bytearray(8)) is None
        done = await parts.add(_part(size, 1, 1), bytearray(PART_BYTES))
        assert done is not None and len(done[1]) == size

    run(scenario())
    from p2p_dtfm.core.protocol.canonical import encode

    for part in (-2, 3, 1 << 40):
        header = _part(2 * PART_BYTES + 8, 1, part)
        with pytest.raises(PeerFault, match="part"):
            parse_header(encode(header), FrameLimits())


def test_a_frame_without_room_waits_for_those_before_it_and_hears_of_the_end() -> None:
    async def scenario() -> None:
        size = 2 * PART_BYTES
        parts = Reassembly(size)
        await parts.add(_part(size, 1, 0), bytearray(PART_BYTES))
        waiting = asyncio.create_task(parts.add(_part(size, 2, 0), bytearray(PART_BYTES)))
        third = asyncio.create_task(parts.add(_part(size, 3, 0), bytearray(PART_BYTES)))
        await asyncio.wait({waiting, third}, timeout=0.05)
        assert not waiting.done() and parts.held_bytes == size
        done = await parts.add(_part(size, 1, 1), bytearray(PART_BYTES))
        assert done is not None
        parts.release(done[0])
        assert await asyncio.wait_for(waiting, 1) is None
        assert not third.done()
        parts.close()
        with pytest.raises(EOFError):
            await asyncio.wait_for(third, 1)

    run(scenario())
