"""Bulk streams: order, acknowledgement, back-pressure, refusal and loss."""

import asyncio
import os
import signal
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams import bulk
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkLimits, BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, FrameLimits
from tests.net.net_support import hosts, run, until

MIB = 1 << 20


def _header(payload_bytes: int, index: int = 0) -> FrameHeader:
    shape = (payload_bytes // 4,)
    return FrameHeader(1, "ab", 2, FrameKind.ACTIVATION, index, 0, "fp32", "float32", shape)


class _Peer:
    """A plane that keeps what it is given."""

    def __init__(self, host: Host, run_digest: str = "aa" * 32, **options: int) -> None:
        self.frames: list[tuple[str, FrameHeader, bytes]] = []
        self.faults: list[tuple[str, PeerFault]] = []
        self.lost: list[tuple[str, str]] = []
        self.waiting: list[FrameHeader] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.host = host
        self.plane = BulkPlane(
            host,
            run_digest,
            BulkListeners(
                self.take,
                lambda sender, fault: self.faults.append((sender, fault)),
                lambda peer, lane, error: self.lost.append((peer, lane)),
            ),
            BulkLimits(FrameLimits(payload_bytes=32 * MIB), **options),
        )

    def take(self, sender: str, header: FrameHeader, payload: bytearray) -> Awaitable[None]:
        return self._take(sender, header, payload)

    async def _take(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        self.waiting.append(header)
        try:
            await self.gate.wait()
        finally:
            self.waiting.remove(header)
        if header.index == 666:
            raise PeerFault("nobody asked for this tensor")
        self.frames.append((sender, header, bytes(payload)))


async def _pair(one: Host, two: Host, **options: int) -> tuple[_Peer, _Peer]:
    peers = _Peer(one, **options), _Peer(two, **options)
    for peer in peers:
        await peer.plane.ready()
    return peers


def test_frames_arrive_whole_in_order_and_acknowledged(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            payloads = [os.urandom(size) for size in (0, 4, 400_000, 3 * MIB)]
            for index, payload in enumerate(payloads):
                await a.plane.send(
                    two.peer_id, "forward", _header(len(payload), index), memoryview(payload)
                )
            await a.plane.flush(two.peer_id, "forward")
            assert [payload for _, _, payload in b.frames] == payloads
            assert [header.index for _, header, _ in b.frames] == [0, 1, 2, 3]
            assert {sender for sender, _, _ in b.frames} == {one.peer_id}
            estimate = a.plane.link_estimate(two.peer_id)
            assert estimate is not None and estimate > MIB
            assert a.plane.link_estimate(one.peer_id) is None

    run(scenario())


def test_a_payload_may_be_reused_once_it_is_sent(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            buffer = bytearray(3 * MIB)
            for index in range(8):
                buffer[:] = bytes([index]) * len(buffer)
                await a.plane.send(two.peer_id, "forward", _header(len(buffer), index), buffer)
            buffer[:] = b"x" * len(buffer)
            await a.plane.flush(two.peer_id, "forward")
            for index, (_, _, payload) in enumerate(b.frames):
                assert payload == bytes([index]) * len(buffer)

    run(scenario())


def test_who_has_closed_opens_no_lane_and_lets_none_in(tmp_path: Path) -> None:
    """Others send until they hear that the peer has gone, and so may the peer itself. Nobody closed
    such lanes."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            await b.plane.close()
            with pytest.raises(Unreachable, match="closing"):
                await b.plane.send(one.peer_id, "forward", _header(4), bytes(4))
            with pytest.raises((Unreachable, Refused)):
                await a.plane.send(two.peer_id, "forward", _header(4), bytes(4))
                await a.plane.flush(two.peer_id, "forward")
            assert not b.frames and not b.plane._incoming.lanes and not b.plane._outgoing

    run(scenario())


def test_who_closes_keeps_nobody_that_still_takes_a_frame(tmp_path: Path) -> None:
    """A tensor of a view to come was kept waiting for seconds after its daemon had ended, too (seed
    502869)."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            b.gate.clear()
            await a.plane.send(two.peer_id, "forward", _header(4), memoryview(bytes(4)))
            await until(lambda: bool(b.waiting), "a frame that is taken")
            await b.plane.close()
            await until(lambda: not b.waiting, "nobody takes it any more")
            assert not b.frames

    run(scenario())


def test_a_sender_that_stops_inside_a_frame_loses_its_stream(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a = await _Peer(one).plane.ready()
            b = _Peer(two, stall_s=1)
            await b.plane.ready()
            await a.send(two.peer_id, "forward", _header(4), bytes(4))
            await a.flush(two.peer_id, "forward")
            a._outgoing[two.peer_id, "forward"].stripes[0].wire.writer.write(b"DTFM")
            await until(lambda: b.lost == [(one.peer_id, "forward")], "the stall is noticed")
            assert not b.faults, "a slow link is no fault"

    run(scenario())


def test_two_peers_that_send_at_once_do_not_wait_for_each_other(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two, window_bytes=4 * MIB)

            async def flood(peer: _Peer, other: Host, lane: str) -> None:
                for index in range(6):
                    payload = bytes(2 * MIB)
                    await peer.plane.send(other.peer_id, lane, _header(2 * MIB, index), payload)
                await peer.plane.flush(other.peer_id, lane)

            await asyncio.gather(
                *(flood(a, two, lane) for lane in ("forward", "reduce")),
                *(flood(b, one, lane) for lane in ("forward", "reduce")),
            )
            assert len(a.frames) == len(b.frames) == 12

    run(scenario())


def test_a_slow_receiver_holds_back_its_sender_on_that_lane_only(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two, window_bytes=2 * MIB)
            b.gate.clear()
            sent = []

            async def flood() -> None:
                for index in range(8):
                    await a.plane.send(two.peer_id, "state", _header(MIB, index), bytes(MIB))
                    sent.append(index)

            flooding = asyncio.create_task(flood())
            await until(lambda: len(sent) >= 1, "the first frame is written")
            done, _ = await asyncio.wait({flooding}, timeout=0.5)
            assert not done and len(sent) <= 2, "no more than the window is out"
            b.gate.set()
            await asyncio.wait_for(flooding, 10)
            await a.plane.flush(two.peer_id, "state")
            assert len(b.frames) == 8

    run(scenario())


def test_a_refused_frame_tells_both_sides_and_the_lane_can_be_opened_again(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            await a.plane.send(two.peer_id, "forward", _header(MIB, 666), bytes(MIB))
            with pytest.raises(Refused, match="nobody asked for this tensor"):
                await a.plane.flush(two.peer_id, "forward")
            assert [(sender, fault.cause) for sender, fault in b.faults] == [
                (one.peer_id, "nobody asked for this tensor")
            ]
            await a.plane.send(two.peer_id, "forward", _header(4, 1), bytes(4))
            await a.plane.flush(two.peer_id, "forward")
            assert [header.index for _, header, _ in b.frames] == [1]

    run(scenario())


def test_a_refusal_reaches_a_sender_that_never_flushes(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, _ = await _pair(one, two)
            with pytest.raises(Refused, match="nobody asked"):
                for _ in range(200):
                    await a.plane.send(two.peer_id, "forward", _header(MIB, 666), bytes(MIB))

    run(scenario())


def test_a_frame_of_impossible_size_costs_the_connection(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            header = _header(4 << 38)
            await a.plane.send(two.peer_id, "forward", _header(4), bytes(4))
            await a.plane.flush(two.peer_id, "forward")
            stream = a.plane._outgoing[two.peer_id, "forward"]
            from p2p_dtfm.core.protocol.canonical import encode

            body = encode(msgspec.structs.replace(header, payload_bytes=1 << 40))
            stream.stripes[0].wire.writer.write(
                b"DTFM\x01\x00" + len(body).to_bytes(2, "big") + body
            )
            await until(lambda: bool(b.faults), "the receiver reports it")
            assert "more than the limit" in b.faults[0][1].cause
            await until(lambda: stream.failure is not None, "the sender hears of it")
            assert isinstance(stream.failure, Refused)

    run(scenario())


def test_another_run_is_refused_on_both_sides(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = _Peer(one, "aa" * 32), _Peer(two, "bb" * 32)
            await a.plane.ready()
            await b.plane.ready()
            with pytest.raises(Refused, match="run aaaaaaaaaaaa meets run bbbbbbbbbbbb"):
                await a.plane.send(two.peer_id, "forward", _header(4), bytes(4))
            await until(lambda: bool(b.faults), "the receiver reports it")
            assert b.faults[0][0] == one.peer_id

    run(scenario())


def test_a_killed_peer_is_unreachable_and_its_unacknowledged_frames_are_reported(
    tmp_path: Path,
) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            b.gate.clear()
            await a.plane.send(two.peer_id, "forward", _header(4), bytes(4))
            os.kill(two.p2pd_pid, signal.SIGKILL)
            with pytest.raises(Unreachable):
                await asyncio.wait_for(a.plane.flush(two.peer_id, "forward"), 5)
            assert a.lost == [(two.peer_id, "forward")]
            with pytest.raises(Unreachable):
                await asyncio.wait_for(
                    a.plane.send(two.peer_id, "forward", _header(4), bytes(4)), 15
                )
            b.gate.set()
            await until(lambda: b.lost == [(one.peer_id, "forward")], "the other side hears")

    run(scenario())


def test_lost_frames_are_told_to_the_next_send(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            b.gate.clear()
            await a.plane.send(two.peer_id, "forward", _header(4, 1), bytes(4))
            b.plane.disconnect(one.peer_id)
            await until(lambda: bool(a.lost), "the stream breaks")
            with pytest.raises(Unreachable):
                await a.plane.send(two.peer_id, "forward", _header(4, 2), bytes(4))
            b.gate.set()
            await a.plane.send(two.peer_id, "forward", _header(4, 3), bytes(4))
            await a.plane.flush(two.peer_id, "forward")
            assert b.frames[-1][1].index == 3

    run(scenario())


def test_a_failed_opening_is_told_to_all_that_waited_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of those that waited began anew, one after the other. With a peer that says nothing the
    last of a hundred kept its payload for a quarter of an hour."""
    monkeypatch.setattr(bulk, "OPEN_DEADLINE_S", 2.0)

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            hellos: list[str] = []

            async def say_nothing(sender: str, reader: asyncio.StreamReader, writer: Any) -> None:
                hellos.append(sender)
                await reader.read()

            await two.serve_streams(bulk._protocol("reduce"), say_nothing, "lane reduce")
            a = _Peer(one)
            sends = [
                a.plane.send(two.peer_id, "reduce", _header(4, index), bytes(4))
                for index in range(6)
            ]
            ends = await asyncio.gather(*sends, return_exceptions=True)
            assert all(isinstance(end, Unreachable) for end in ends), ends
            assert len(hellos) == 1
            assert not a.plane._opening
            with pytest.raises(Unreachable, match="no answer"):  # a later call tries again
                await a.plane.send(two.peer_id, "reduce", _header(4), bytes(4))
            assert len(hellos) == 2

    run(scenario())


def test_disconnect_frees_a_sender_that_waits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            b.gate.clear()
            await a.plane.send(two.peer_id, "backward", _header(4), bytes(4))
            waiting = asyncio.create_task(a.plane.flush(two.peer_id, "backward"))
            done, _ = await asyncio.wait({waiting}, timeout=0.1)
            assert not done
            a.plane.disconnect(two.peer_id)
            with pytest.raises(Unreachable, match="disconnected"):
                await asyncio.wait_for(waiting, 2)
            b.gate.set()

    run(scenario())


def test_a_cancelled_send_does_not_leave_half_a_frame(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, b = await _pair(one, two)
            b.gate.clear()
            size = 16 * MIB
            await a.plane.send(two.peer_id, "state", _header(4, 0), bytes(4))
            sending = asyncio.create_task(
                a.plane.send(two.peer_id, "state", _header(size, 1), bytes(size))
            )
            await asyncio.wait({sending}, timeout=0.3)
            assert not sending.done(), "the receiver takes nothing, so the send waits"
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            b.gate.set()
            with pytest.raises(Unreachable):
                await a.plane.send(two.peer_id, "state", _header(4, 2), bytes(4))
            await a.plane.send(two.peer_id, "state", _header(4, 3), bytes(4))
            await a.plane.flush(two.peer_id, "state")
            assert [header.index for _, header, _ in b.frames][-1] == 3
            assert not b.faults

    run(scenario())


def test_who_sent_what_was_lost_hears_of_it_without_sending_more(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            undelivered: list[tuple[str, str, set[int]]] = []

            async def refuse(sender: str, header: FrameHeader, payload: bytearray) -> None:
                raise PeerFault("not due")

            listeners = BulkListeners(
                refuse,
                lambda sender, fault: None,
                undelivered=lambda peer, lane, failure, views: undelivered.append(
                    (peer, lane, {view.number for view in views})
                ),
            )
            await BulkPlane(two, "aa" * 32, listeners).ready()
            plane = BulkPlane(one, "aa" * 32, listeners)
            await plane.send(two.peer_id, "forward", _header(1000), bytes(1000))
            await until(lambda: undelivered, "the loss is told")
            assert undelivered == [(two.peer_id, "forward", {1})]

    run(scenario())
