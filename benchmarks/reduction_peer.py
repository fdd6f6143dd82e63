"""One of our peers in `benchmarks.reduction`: a process with a p2pd of its own."""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import NoReturn

import torch

from benchmarks.reduction_values import ELEMENTS, digest_of, processor_s, say, values_of
from p2p_dtfm.core.planner.wire_plan import cut_into_chunks
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import CodecSpec, parse_run_spec
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.reduction.segment_exchange import exchange
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.bulk import BulkPlane
from p2p_dtfm.net.streams.bulk_settings import BulkListeners
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind, Payload
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage.segment_reduction import SegmentCut, SegmentReduction

RUN_DIGEST = "00" * 32
SPEC = parse_run_spec(
    {
        "name": "reduction",
        "total_steps": 1,
        "model": {"layers": 1, "width": 8, "heads": 1, "context": 8, "vocabulary": 2},
        "batch": {"global_batch": 1, "microbatch": 1},
        "optimizer": {"peak_learning_rate": 1e-3},
        "evaluation": {"sequences": 1},
    },
    "benchmark",
)


class _Frames:
    """`daemon.step.reduction.segment_exchange.Courses` over the bulk plane: each frame waits for
    its taker."""

    def __init__(self, codec: str) -> None:
        self.plane: BulkPlane | None = None
        self.step = 0
        self._codec = codec
        self._held: dict[tuple[object, ...], asyncio.Future[bytearray]] = {}

    def arrived(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        self._slot(header.step, sender, header.kind, header.index).set_result(payload)

    async def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> None:
        assert self.plane is not None
        header = FrameHeader(
            1, "00", self.step, kind, chunk, 0, self._codec, "float32", (elements,)
        )
        await self.plane.send(peer_id, "reduce", header, payload)

    async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
        slot = self._slot(self.step, peer_id, kind, chunk)
        try:
            return await slot
        finally:
            del self._held[self.step, peer_id, kind, chunk]

    async def refuse(self, peer_id: str, fault: PeerFault) -> NoReturn:
        raise fault

    def _slot(self, *key: object) -> asyncio.Future[bytearray]:
        if key not in self._held:
            self._held[key] = asyncio.get_running_loop().create_future()
        return self._held[key]


async def _our_peer(number: int, folder: Path, direct: bool) -> None:
    host = await Host.start(folder / f"{number}.key", ["/ip4/127.0.0.1/tcp/0"])
    frames, compute = _Frames("fp32"), Compute()
    lines = DirectLines(host, RUN_DIGEST, ["/ip4/127.0.0.1/tcp/0"]) if direct else None
    plane = BulkPlane(host, RUN_DIGEST, BulkListeners(frames.arrived, _complain), lines=lines)
    frames.plane = await plane.ready()
    say(address=(await host.addresses())[0])
    addresses = json.loads(await asyncio.to_thread(sys.stdin.readline))
    holders = [address.rsplit("/", 1)[1] for address in addresses]
    for peer_id, address in zip(holders, addresses, strict=True):
        if peer_id != host.peer_id:
            await host.connect(peer_id, [address], 10.0)
    chunks = cut_into_chunks(ELEMENTS, tuple(holders), (1,) * len(holders))
    codec = codec_of("fp32", CodecSpec())
    room = torch.zeros(ELEMENTS)
    while True:
        values, computed_s = values_of(number), processor_s()
        say(ready=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
        began_s = time.monotonic()
        cut = SegmentCut(0, chunks.bounds, [values.numel()])
        reduction = SegmentReduction(SPEC, codec, frames.step, cut, None, room)
        await compute.run(reduction.fill, 0, values)
        await exchange(reduction, host.peer_id, holders, chunks.owners, frames, compute, _at_once)
        elapsed_s = time.monotonic() - began_s
        computed_s = processor_s() - computed_s
        frames.step += 1
        say(elapsed_s=elapsed_s, computed_s=computed_s, digest=digest_of(reduction.reduced))
    compute.close()
    await plane.close()
    await host.close()


async def _at_once(layer: int) -> None:
    """All gradients are there at once."""


def _complain(sender: str, fault: PeerFault) -> None:
    print(f"fault: {fault}", file=sys.stderr)


if __name__ == "__main__":
    asyncio.run(_our_peer(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "direct"))
