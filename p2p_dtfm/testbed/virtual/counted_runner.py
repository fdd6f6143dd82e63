"""A stage that counts what it has computed. A judge compares that with what a daemon says it
gave."""

from collections import Counter
from typing import Any

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.train.stage.stage_runner import StageRunner
from p2p_dtfm.train.stage.timed import TimedStageRunner

Tensor = Any


def counted_runner(
    taken: Counter[str], peer_id: str, device: Device, *stage: Any, **options: Any
) -> StageRunner:
    """`taken` counts, by peer, tokens times the layers they went through, in all lives of the
    peer."""
    runner = TimedStageRunner(device, *stage, **options)
    run = runner._run

    def counting(layer: int, entry: Tensor, *others: Any) -> Tensor:
        taken[peer_id] += entry.shape[0] * entry.shape[1]
        return run(layer, entry, *others)

    runner._run = counting  # type: ignore[method-assign, assignment]
    return runner
