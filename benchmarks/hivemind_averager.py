"""One of hivemind's peers in `benchmarks.reduction`: `DecentralizedAverager`, as it comes.

Imports nothing of ours that imports hivemind: `p2p_dtfm.net` loads only its libp2p part.
"""

import json
import sys
import time

import torch
from hivemind import DHT
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.control import AveragingStage
from hivemind.utils import get_dht_time

from benchmarks.reduction_values import ELEMENTS, PEERS, digest_of, processor_s, say, values_of

GROUP_S = 60.0


def main(number: int) -> None:
    first = sys.stdin.readline().strip()
    dht = DHT(
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        initial_peers=json.loads(first),
        start=True,
    )
    say(address=str(dht.get_visible_maddrs()[0]))
    averager = DecentralizedAverager(
        [torch.zeros(ELEMENTS)],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=PEERS,
        min_group_size=PEERS,
        min_matchmaking_time=2.0,
        request_timeout=5.0,
        averaging_alpha=1.0,
    )
    while True:
        with averager.get_tensors() as tensors:
            tensors[0].copy_(values_of(number))
        if not sys.stdin.readline():
            break
        control = averager.step(
            wait=False,
            scheduled_time=get_dht_time() + 4.0,
            require_trigger=True,
            timeout=GROUP_S,
        )
        end_s = time.monotonic() + GROUP_S
        while control.stage != AveragingStage.AWAITING_TRIGGER and time.monotonic() < end_s:
            if control.done():
                break
            time.sleep(0.01)
        computed_s = processor_s()
        say(ready=not control.done() and control.stage == AveragingStage.AWAITING_TRIGGER)
        sys.stdin.readline()
        began_s = time.monotonic()
        control.allow_allreduce()
        gathered = control.result(GROUP_S)
        elapsed_s = time.monotonic() - began_s
        computed_s = processor_s() - computed_s
        with averager.get_tensors() as tensors:
            result = tensors[0].clone()
        expected = torch.stack([values_of(n)[:1000] for n in range(PEERS)]).mean(0)
        error = float((result[:1000] - expected).abs().max())
        say(
            elapsed_s=elapsed_s,
            computed_s=computed_s,
            digest=digest_of(result),
            group=0 if gathered is None else len(gathered),
            error=error,
        )
    averager.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]))
