"""Activations go before parameter gradients, and gradients before state; nothing starves."""

import asyncio
import os
import random
import time
from pathlib import Path

import pytest

from p2p_dtfm.net.shaping import LineLimit
from p2p_dtfm.net.streams.bulk import LANES, BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind
from p2p_dtfm.net.streams.lane_priority import GIVE_WAY_S, RANKS, LanePriority
from p2p_dtfm.ports import now
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from tests.net.net_support import hosts, run

KIB = 1 << 10


def test_every_lane_has_a_rank() -> None:
    assert set(RANKS) == set(LANES)
    assert RANKS["forward"] == RANKS["backward"] < RANKS["reduce"] < RANKS["state"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_lane_waits_for_those_before_it_on_its_link_or_uplink(shared: bool) -> None:
    async def scenario() -> None:
        way = LanePriority()
        way.shares_uplink = shared
        with way.taken("x", "forward"):
            await way.give("x", "backward")
            waiting = asyncio.create_task(way.give("x", "reduce"))
            elsewhere = asyncio.create_task(way.give("y", "state"))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done() and elsewhere.done() is not shared
        await asyncio.gather(waiting, elsewhere)
        with way.taken("x", "state"):
            await way.give("x", "reduce")

    run(scenario())


def test_it_does_not_wait_for_ever() -> None:
    async def scenario() -> None:
        way = LanePriority()
        with way.taken("x", "backward"):
            began_s = time.monotonic()
            await way.give("x", "state")
            assert time.monotonic() - began_s >= 0.9 * GIVE_WAY_S

    run(scenario())


def test_what_is_written_and_has_not_left_goes_before_what_is_not_written() -> None:
    """Buffers take a small frame at once. Sixteen streams of another lane had the link then. The
    last gradient of a step came behind three megabytes that went to a guardian."""

    async def scenario() -> None:
        way = LanePriority()
        way.leaves("x", "backward", 0.1)
        began_s = now.monotonic_s()
        await way.give("y", "state")
        await way.give("x", "forward")
        assert now.monotonic_s() - began_s < 0.05 and way.must_give("x", "state")
        await way.give("x", "state")
        assert 0.09 <= now.monotonic_s() - began_s < GIVE_WAY_S
        assert not way.must_give("x", "state")

    loop = VirtualLoop()  # no other program makes anybody late
    process = Process("a.0", loop, random.Random(0))
    loop.run_until_complete(process.begin(scenario()))
    loop.close()


def test_a_frame_that_a_buffer_took_keeps_its_place_until_it_has_left(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            one.shaper = LineLimit(500_000, 0)
            listeners = BulkListeners(lambda *frame: None, lambda sender, fault: None)
            planes = [await BulkPlane(host, "aa" * 32, listeners).ready() for host in (one, two)]
            frame = os.urandom(128 * KIB)
            await planes[0].send(two.peer_id, "backward", header(FrameKind.ACTIVATION, 4), b"abcd")
            began_s = time.monotonic()
            due = header(FrameKind.ACTIVATION_GRADIENT, len(frame))
            await planes[0].send(two.peer_id, "backward", due, frame)
            assert time.monotonic() - began_s < 0.1, "it lies in a buffer"
            while planes[0]._lane_priority.must_give(two.peer_id, "state"):
                await asyncio.sleep(0.005)
            assert 0.2 < time.monotonic() - began_s < 0.4, "128 KiB at 500 KB/s are 0.26 s"
            for plane in planes:
                await plane.close()

    run(scenario())


@pytest.mark.parametrize("same_peer", [True, False])
def test_an_activation_overtakes_state_on_a_limited_uplink(same_peer: bool, tmp_path: Path) -> None:
    """At 4 MB/s the uplink carries 16 pieces of 256 KiB in a second. Beside an activation of 2 MiB
    it carries hardly any."""

    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, two, three):
            one.shaper = LineLimit(4_000_000, 0)
            arrived: list[FrameKind] = []
            planes = [
                BulkPlane(
                    host,
                    "aa" * 32,
                    BulkListeners(
                        lambda sender, header, payload: arrived.append(header.kind),
                        lambda sender, fault: pytest.fail(str(fault)),
                    ),
                )
                for host in (one, two, three)
            ]
            for plane in planes:
                await plane.ready()
            sender, other = planes[0], two if same_peer else three
            state, activation = os.urandom(256 * KIB), os.urandom(2048 * KIB)
            await sender.send(other.peer_id, "forward", header(FrameKind.ACTIVATION, 4), b"abcd")
            whole = header(FrameKind.LAYER_STATE, len(state))
            sending = asyncio.gather(
                *(sender.send(two.peer_id, "state", whole, state) for _ in range(32))
            )
            while arrived.count(FrameKind.LAYER_STATE) < 2:
                await asyncio.sleep(0.01)
            before = arrived.count(FrameKind.LAYER_STATE)
            due = header(FrameKind.ACTIVATION, len(activation))
            await sender.send(other.peer_id, "forward", due, activation)
            while FrameKind.ACTIVATION not in arrived:
                await asyncio.sleep(0.01)
            beside = arrived.index(FrameKind.ACTIVATION) - 1 - before
            assert beside <= 5, "a fair share would have been eight pieces"
            await sending
            while arrived.count(FrameKind.LAYER_STATE) < 32:
                await asyncio.sleep(0.01)
            for plane in planes:
                await plane.close()

    run(scenario())


def header(kind: FrameKind, payload_bytes: int) -> FrameHeader:
    return FrameHeader(1, "ab", 2, kind, 0, 0, "fp32", "float32", (payload_bytes // 4,))
