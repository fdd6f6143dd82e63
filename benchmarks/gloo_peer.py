"""A Gloo peer in `benchmarks.reduction`: a process of torch.distributed, nothing sealed."""

import asyncio
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.reduction_values import PEERS, digest_of, processor_s, say, values_of


async def _gloo_peer(number: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/gloo", rank=number, world_size=PEERS
    )
    while True:
        values, computed_s = values_of(number), processor_s()
        say(ready=True)
        if not await asyncio.to_thread(sys.stdin.readline):
            break
        began_s = time.monotonic()
        dist.all_reduce(values)
        elapsed_s, computed_s = time.monotonic() - began_s, processor_s() - computed_s
        say(elapsed_s=elapsed_s, computed_s=computed_s, digest=digest_of(values))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    asyncio.run(_gloo_peer(int(sys.argv[1]), Path(sys.argv[2])))
