"""Probes measure, are bounded, and do not disturb one another."""

import asyncio
from pathlib import Path

import pytest

from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.probing import Probes, probe_bandwidth, probe_round_trip
from tests.net.net_support import hosts, run


def test_round_trip_and_bandwidth_of_loopback_are_plausible(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):
            a, _ = await Probes(one).ready(), await Probes(two).ready()
            assert 50_000 < await probe_round_trip(a, two.peer_id) < 500_000_000
            assert 1 << 20 < await probe_bandwidth(a, two.peer_id) < 20 << 30

    run(scenario())


def test_a_peer_serves_one_bandwidth_probe_at_a_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 3) as (one, two, three):
            target = await Probes(one).ready()
            reader, writer = await two.open_stream(one.peer_id, "/p2p-dtfm/1/bandwidth", 5)
            writer.write(b"?")
            await reader.readexactly(8)
            assert target._serving
            with pytest.raises(Refused, match="busy"):
                await Probes(three).probe_bandwidth(one.peer_id)
            writer.close()
            for _ in range(100):
                if not target._serving:
                    break
                await asyncio.sleep(0.02)
            assert await Probes(three).probe_bandwidth(one.peer_id) > 0

    run(scenario())


def test_a_silent_target_costs_a_bounded_time(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):

            async def silent(
                sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> None:
                writer.write(bytes(8))
                await asyncio.Event().wait()

            await one.serve_streams("/p2p-dtfm/1/bandwidth", silent)
            with pytest.raises(Unreachable, match="64 KiB"):
                await Probes(two).probe_bandwidth(one.peer_id, deadline_s=0.5)
            nobody = Identity.load_or_create(tmp_path / "nobody").peer_id
            with pytest.raises(Unreachable):
                await Probes(two).probe_round_trip(nobody)

    run(scenario())


def test_a_slow_target_is_measured_by_what_arrived(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (one, two):

            async def slow(
                sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
            ) -> None:
                writer.write(bytes(8))
                await reader.readexactly(1)
                for step in range(1, 1000):
                    await reader.readexactly(1 << 16)
                    await asyncio.sleep(0.05)  # about 1.3 MB/s
                    writer.write((step << 16).to_bytes(8, "big"))

            await one.serve_streams("/p2p-dtfm/1/bandwidth", slow)
            rate = await Probes(two).probe_bandwidth(one.peer_id, deadline_s=0.7)
            assert 200_000 < rate < 1_400_000

    run(scenario())
