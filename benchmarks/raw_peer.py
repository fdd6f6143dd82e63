"""One of the bare peers in `benchmarks.reduction`: streams of p2pd and nothing else.

Each peer sends every other peer as many bytes as in a reduction: its part of what the other owns,
and the sum of what it owns itself. It throws away what it gets. What is left is p2pd, and one copy
into and one out of this process.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

from benchmarks.reduction_values import ELEMENTS, PEERS, processor_s, say, values_of
from p2p_dtfm.net.libp2p.host import Host, Writer
from p2p_dtfm.net.streams.wire import widen

BYTES = 2 * 4 * ELEMENTS // PEERS
"""Bytes to each other peer."""
PIECE_BYTES = 1 << 18
NAME = "benchmark-raw"


async def _bare_peer(number: int, folder: Path) -> None:
    host = await Host.start(folder / f"raw-{number}.key", ["/ip4/127.0.0.1/tcp/0"])
    counted = _Counted()
    await host.serve_streams(NAME, counted.take)
    say(address=(await host.addresses())[0])
    addresses = json.loads(await asyncio.to_thread(sys.stdin.readline))
    others = [at.rsplit("/", 1)[1] for at in addresses if not at.endswith(host.peer_id)]
    for address in addresses:
        if not address.endswith(host.peer_id):
            await host.connect(address.rsplit("/", 1)[1], [address], 10.0)
    writers = [(await host.open_stream(other, NAME, 10.0))[1] for other in others]
    payload = memoryview(values_of(number).numpy()).cast("B")[:BYTES]
    while True:
        say(ready=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
        began_s, computed_s = time.monotonic(), processor_s()
        counted.begin(len(others) * BYTES)
        await asyncio.gather(*(_send(writer, payload) for writer in writers))
        await counted.all_came.wait()
        elapsed_s, computed_s = time.monotonic() - began_s, processor_s() - computed_s
        say(elapsed_s=elapsed_s, computed_s=computed_s, digest="")
    await host.close()


async def _send(writer: Writer, payload: memoryview) -> None:
    for start in range(0, len(payload), PIECE_BYTES):
        writer.write(payload[start : start + PIECE_BYTES])
        await writer.drain()


class _Counted:
    """Bytes that came, from any peer. Those of the next round may come before it begins here."""

    def __init__(self) -> None:
        self.all_came = asyncio.Event()
        self._due = 0

    def begin(self, due: int) -> None:
        self._due += due
        self._look()

    async def take(self, sender: str, reader: asyncio.StreamReader, writer: Writer) -> None:
        widen(reader)
        while data := await reader.read(1 << 20):
            self._due -= len(data)
            self._look()

    def _look(self) -> None:
        if self._due <= 0:
            self.all_came.set()
        else:
            self.all_came.clear()


if __name__ == "__main__":
    asyncio.run(_bare_peer(int(sys.argv[1]), Path(sys.argv[2])))
