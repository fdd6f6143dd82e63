"""What is half sent is held for a bounded time, whichever way it comes, and holds up nobody
else."""

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from p2p_dtfm.core.gate.byte_budget import ByteBudget
from p2p_dtfm.net import event_loop
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams import frames as frames_of
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.byte_room import ByteRoom
from p2p_dtfm.net.streams.frames import (
    PART_BYTES,
    FrameHeader,
    FrameKind,
    FrameLimits,
    encode_frame,
    encode_part,
    read_frame,
)
from p2p_dtfm.net.streams.reassembly import Reassembly
from p2p_dtfm.net.streams.stripes import Stripe
from p2p_dtfm.net.streams.wire import LineWire, StreamWire
from p2p_dtfm.ports import now
from p2p_dtfm.ports.now import MachineClock
from tests.net.net_support import LOOPBACK, hosts, run, until

MIB = 1 << 20
RUN = "aa" * 32


def _header(payload_bytes: int, index: int = 0) -> FrameHeader:
    shape = (payload_bytes // 4,)
    return FrameHeader(1, "ab", 2, FrameKind.ACTIVATION, index, 0, "fp32", "float32", shape)


def _part(size: int, frame: int, part: int) -> FrameHeader:
    header = msgspec.structs.replace(_header(size), payload_bytes=size)
    return msgspec.structs.replace(header, frame=frame, part=part)


class _Peer:
    def __init__(self, host: Host, stall_s: float = 60.0, by_lines: bool = False) -> None:
        self.frames: list[int] = []
        self.lost: list[str] = []
        self.faults: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.host = host
        lines = DirectLines(host, RUN, LOOPBACK, stall_s=stall_s) if by_lines else None
        self.plane = BulkPlane(
            host,
            RUN,
            BulkListeners(
                self._take,
                lambda sender, fault: self.faults.append(fault.cause),
                lambda peer, lane, error: self.lost.append(error.cause),
                lambda peer, lane, failure, views: None,
            ),
            BulkLimits(FrameLimits(payload_bytes=16 * MIB), 16 * MIB, stall_s),
            lines,
        )

    async def _take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        await self.gate.wait()
        self.frames.append(header.index)

    async def stripe(self, to: str, is_direct: bool, lane: str = "forward") -> Stripe:
        """The first stripe of a lane that is open."""
        await self.plane.send(to, lane, _header(4, 1_000), bytes(4))
        if is_direct:
            await until(lambda: self.plane.is_direct(to, lane), "the lane moves")
        await self.plane.flush(to, lane)
        return self.plane._outgoing[to, lane].stripes[0]


async def _send_parts(stripe: Stripe, frame: int, parts: range, size: int) -> None:
    payload = memoryview(bytes(size))
    for part in parts:
        header = _header(size, frame)
        start = encode_part(header, frame, part, payload, not stripe.wire.seals)
        piece = payload[part * PART_BYTES : (part + 1) * PART_BYTES]
        await stripe.send(frame, header.view, start, piece)


@contextlib.asynccontextmanager
async def _pair(folder: Path, stall_s: float, by_lines: bool) -> AsyncIterator[tuple[_Peer, _Peer]]:
    async with hosts(folder, 2) as (one, two):
        a, b = _Peer(one, by_lines=by_lines), _Peer(two, stall_s, by_lines)
        for peer in (a, b):
            await peer.plane.ready()
        try:
            yield a, b
        finally:
            for peer in (a, b):
                await peer.plane.close()


@pytest.mark.parametrize("by_lines", [False, True])
def test_a_frame_of_which_no_more_comes_is_dropped(tmp_path: Path, by_lines: bool) -> None:
    """Between two parts a stream is between frames, where it may wait as long as it likes. One part
    held the memory of the whole frame for ever."""

    async def scenario() -> None:
        async with _pair(tmp_path, 1.0, by_lines) as (a, b):
            stripe = await a.stripe(b.host.peer_id, by_lines)
            await asyncio.sleep(1.5)
            assert not b.lost, "nothing is half here"
            await _send_parts(stripe, 7, range(1), 8 * MIB)
            await until(lambda: b.plane.room.total_bytes == 8 * MIB, "it is half here")
            began_s = time.monotonic()
            await until(lambda: bool(b.lost), "nobody waits for the rest any more")
            assert time.monotonic() - began_s < 2.5
            assert "half here" in b.lost[0] and b.plane.room.total_bytes == 0 and not b.faults
            await until(lambda: not b.plane._incoming.lanes, "and its lane ends")

    run(scenario())


@pytest.mark.parametrize("by_lines", [False, True])
def test_parts_that_come_slowly_and_steadily_are_waited_for(tmp_path: Path, by_lines: bool) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path, 1.0, by_lines) as (a, b):
            stripe = await a.stripe(b.host.peer_id, by_lines)
            for part in range(6):
                await _send_parts(stripe, 7, range(part, part + 1), 6 * PART_BYTES)
                await asyncio.sleep(0.5)
            await until(lambda: 7 in b.frames, "it is whole")
            assert not b.lost and b.plane.room.total_bytes == 0

    run(scenario())


def test_a_part_behind_what_this_peer_has_not_taken_is_not_late(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with _pair(tmp_path, 0.6, False) as (a, b):
            stripe = await a.stripe(b.host.peer_id, False)
            size = 2 * PART_BYTES
            await _send_parts(stripe, 7, range(1), size)
            await until(lambda: b.plane.room.total_bytes == size, "it is half here")
            b.gate.clear()
            _, start = encode_frame(_header(4, 8), bytes(4))
            await stripe.send(8, _header(4, 8).view, start, memoryview(bytes(4)))
            await _send_parts(stripe, 7, range(1, 2), size)
            await asyncio.sleep(2.0)
            assert not b.lost
            b.gate.set()
            await until(lambda: b.frames[1:] == [8, 7], "both are taken")

    run(scenario())


class _Clock(MachineClock):
    now_ns = 0

    def monotonic_ns(self) -> int:
        return self.now_ns

    def goes_on(self, seconds: float) -> None:
        self.now_ns += int(seconds * 1e9)


def test_what_is_half_here_has_the_time_of_a_whole_frame() -> None:
    size = 64 * MIB

    async def scenario() -> None:
        clock = _Clock()
        now.live_by(clock)
        parts = Reassembly(size)
        begun = clock.now_ns
        for part in range(255):  # over a line of 1 Mbit/s the frame takes nine minutes
            await parts.add(_part(size, 1, part), bytearray(PART_BYTES))
            parts.listening.moved()
            clock.goes_on(8 * PART_BYTES / 1e6)
            assert not parts.why_late(60.0)
        assert clock.now_ns - begun > 500e9
        with parts.listening.inside():
            clock.goes_on(100.0)
            assert not parts.why_late(60.0), "a stream in the middle of a part has its own time"
        with parts.listening.kept_waiting():
            clock.goes_on(1e6)
            assert not parts.why_late(60.0), "who is kept waiting is not late"
        clock.goes_on(61.0)
        assert "nothing came" in parts.why_late(60.0)
        parts.listening.moved()
        clock.goes_on(59.0)
        assert not parts.why_late(60.0)
        for _ in range(280):
            clock.goes_on(59.0)
            parts.listening.moved()
        assert parts.why_late(60.0) == "a tensor comes too slowly"
        parts.close()
        assert not parts.why_late(60.0) and not parts.is_half_here

    event_loop.run(scenario())


def test_a_whole_frame_through_libp2p_that_drips_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frames_of, "SLOWEST_BYTES_PER_S", 4 * MIB)

    async def scenario() -> None:
        for pause_s, is_late in ((0.0, False), (0.1, True)):
            reader = asyncio.StreamReader()
            payload = bytes(MIB)
            _, start = encode_frame(_header(len(payload)), payload)
            reader.feed_data(start)

            async def drip(reader: asyncio.StreamReader = reader, pause_s: float = pause_s) -> None:
                step = 1 << 14
                for _ in range(0, MIB, step):
                    reader.feed_data(bytes(step))
                    await asyncio.sleep(pause_s)

            dripping = asyncio.create_task(drip())
            reading = read_frame(reader, FrameLimits(payload_bytes=2 * MIB), 0.5)
            began_s = time.monotonic()
            if is_late:
                with pytest.raises(TimeoutError):
                    await reading
                assert time.monotonic() - began_s < 2.0, "silent for 0.1 s at a time, and no longer"
            else:
                frame = await reading
                assert frame is not None and len(frame[1]) == MIB
            dripping.cancel()

    run(scenario())


def test_who_fills_the_room_holds_up_no_member(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 4, all_met=True) as (one, hog, honest, former):
            b = _Peer(one)
            b.plane.room = room = ByteRoom(
                ByteBudget(16 * MIB, 16 * MIB), lambda sender: sender != former.peer_id
            )
            b.plane._incoming._room = room
            await b.plane.ready()
            lanes = [_Peer(host) for host in (hog, honest, former)]
            stripes = [await peer.stripe(one.peer_id, False) for peer in lanes]
            await _send_parts(stripes[0], 7, range(1), 16 * MIB)
            await until(lambda: room.total_bytes == 16 * MIB, "it is full")
            await _send_parts(stripes[1], 9, range(4), MIB)
            await lanes[1].plane.send(one.peer_id, "reduce", _header(MIB, 10), bytes(MIB))
            await until(lambda: {9, 10} <= set(b.frames), "a member's come all the same")
            waits = asyncio.create_task(
                lanes[2].plane.send(one.peer_id, "reduce", _header(MIB, 11), bytes(MIB))
            )
            await asyncio.sleep(0.5)
            assert 11 not in b.frames, "of former members there may be any number"
            lanes[0].plane.disconnect(one.peer_id)
            await until(lambda: 11 in b.frames, "it comes in its turn")
            await waits
            for peer in (b, *lanes):
                await peer.plane.close()

    run(scenario())


def test_a_tensor_waits_before_memory_is_taken_for_it(tmp_path: Path) -> None:
    """The receiver has yet to hear of what the tensor belongs to."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            known, taken = asyncio.Event(), []

            async def wait() -> None:
                await known.wait()

            plane = BulkPlane(
                one,
                RUN,
                BulkListeners(
                    lambda sender, header, payload: taken.append(header.index),
                    lambda *_: None,
                    admit=lambda sender, lane, header: wait() if header.index else None,
                ),
            )
            await plane.ready()
            a = _Peer(two)
            await a.plane.send(one.peer_id, "forward", _header(4), bytes(4))
            await a.plane.flush(one.peer_id, "forward")
            sending = asyncio.create_task(
                a.plane.send(one.peer_id, "forward", _header(MIB, 1), bytes(MIB))
            )
            await asyncio.sleep(0.3)
            assert taken == [0] and plane.room.total_bytes == 0
            known.set()
            await sending
            await a.plane.flush(one.peer_id, "forward")
            assert taken == [0, 1]
            await plane.close()
            await a.plane.close()

    run(scenario())


def test_little_comes_behind_a_header_that_waits(tmp_path: Path) -> None:
    """What a stream buffers counts in no budget, and one sender may have 64 streams."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Peer(two), _Peer(one)
            known = asyncio.Event()

            async def wait() -> None:
                await known.wait()

            heard = b.plane._incoming.listeners
            b.plane._incoming.listeners = dataclasses.replace(
                heard, admit=lambda sender, lane, header: wait() if header.index == 1 else None
            )
            await b.plane.ready()
            await a.stripe(one.peer_id, False)
            # a busy machine's round trip is long, and of more streams another one may have the next
            a.plane._outgoing[one.peer_id, "forward"].most_stripes = 1
            (lane,) = b.plane._incoming.lanes.values()
            (wire,) = lane.wires
            assert isinstance(wire, StreamWire)
            buffered = wire.reader._buffer  # type: ignore[attr-defined]
            size = 4 * MIB

            async def send_two(first: int) -> None:  # the second is buffered while the first comes
                for index in (first, first + 1):
                    await a.plane.send(one.peer_id, "forward", _header(size, index), bytes(size))
                await a.plane.flush(one.peer_id, "forward")

            sending = asyncio.create_task(send_two(0))
            await until(lambda: 0 in b.frames and len(buffered) > 0, "the second one begins")
            await asyncio.sleep(0.5)
            assert len(buffered) <= MIB // 2
            known.set()
            await sending
            b.gate.clear()
            sending = asyncio.create_task(send_two(2))
            await until(lambda: b.plane.room.total_bytes == size, "one comes")
            await until(lambda: len(buffered) > 0, "the next one begins")
            await asyncio.sleep(0.5)
            assert len(buffered) <= MIB // 2, "behind one that is not taken"
            b.gate.set()
            await sending
            assert b.frames[1:] == [0, 1, 2, 3]
            for peer in (a, b):
                await peer.plane.close()

    run(scenario())


def test_the_wires_are_what_they_are_said_to_be(tmp_path: Path) -> None:
    async def scenario() -> None:
        for by_lines, kind in ((False, StreamWire), (True, LineWire)):
            async with _pair(tmp_path / str(by_lines), 60.0, by_lines) as (a, b):
                with contextlib.suppress(Unreachable):
                    stripe = await a.stripe(b.host.peer_id, by_lines)
                    assert isinstance(stripe.wire, kind)

    run(scenario())
