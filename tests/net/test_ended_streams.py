"""Nothing stays of a stream that was closed here, whatever its other end does."""

import asyncio
import os
from pathlib import Path

import pytest

from p2p_dtfm.net.libp2p import ended_streams
from p2p_dtfm.net.libp2p.host import Writer
from p2p_dtfm.net.shaping import LineLimit, fine_timer
from p2p_dtfm.ports import now
from tests.net.net_support import hosts, run, until

MIB = 1 << 20
STREAMS = 6


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ended_streams, "LOOK_S", 1.0)


async def writes_much_and_goes(sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
    await reader.read(1)
    writer.write(bytes(4 * MIB))


@pytest.mark.parametrize("is_limited", [False, True])
def test_who_reads_nothing_keeps_no_descriptor_here(tmp_path: Path, is_limited: bool) -> None:
    """A stranger had this peer relay to an end that does not read. It left one descriptor for each
    circuit, also once the circuit was over."""

    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (here, stranger):
            if is_limited:
                here.shaper = LineLimit(1000 * MIB, 1000 * MIB)
                await fine_timer.until(now.monotonic_s() + 0.001)  # all streams share this timer
            await here.serve_streams("/test/much", writes_much_and_goes)
            before, held = descriptors(), []
            for _ in range(STREAMS):
                _, writer = await stranger.open_stream(here.peer_id, "/test/much", 5)
                writer.write(b"?")
                held.append(writer)
            own_ends = STREAMS  # the stranger's descriptors, in the same process
            await until(lambda: descriptors() <= before + own_ends, "all are let go of")

    run(scenario())


@pytest.mark.parametrize("uplink_bytes_per_s", [0, 2 * MIB])
def test_who_reads_slowly_gets_all(tmp_path: Path, uplink_bytes_per_s: int) -> None:
    async def scenario() -> None:
        async with hosts(tmp_path, 2) as (here, other):
            if uplink_bytes_per_s:
                here.shaper = LineLimit(uplink_bytes_per_s, 0)
            await here.serve_streams("/test/much", writes_much_and_goes)
            reader, writer = await other.open_stream(here.peer_id, "/test/much", 5)
            writer.write(b"?")
            count = 0
            while data := await reader.read(MIB // 4):
                count += len(data)
                await asyncio.sleep(0.1)
            assert count == 4 * MIB

    run(scenario())
