"""An audit of many microbatches: others see its progress, and other jobs run between."""

import asyncio
from typing import Any

import torch

from p2p_dtfm.core.audit.boundaries import Due
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.stage_account import Judge
from p2p_dtfm.net import event_loop
from p2p_dtfm.train.model.layer_state import LayerState
from tests.core.builders import run_spec

SPEC = run_spec()
LAYERS = SPEC.model.layers + 2
PLAN = Plan((Pipeline((Stage("a", 0, LAYERS, 1),), 0, 8),), (), 1)


class Batches:
    """Notes the progress as each microbatch begins."""

    def __init__(self, compute: Compute) -> None:
        self._compute = compute
        self.done: list[int] = []

    def __call__(self, step: int, number: int) -> Any:
        self.done.append(self._compute.done_count)
        tokens = torch.zeros(SPEC.batch.microbatch, SPEC.model.context, dtype=torch.int64)
        return tokens, tokens

    def weight(self, step: int, number: int) -> float:
        return 1.0


async def audit(compute: Compute, batches: Batches) -> None:
    states = {layer: LayerState.genesis(SPEC, layer) for layer in range(LAYERS)}
    judge = Judge(SPEC, PLAN, None, states, compute, None)  # type: ignore[arg-type]
    several: Any = batches
    await judge.own_work("a", (0, 1, 2), several, 7, 1, held_out=(8, 9), due=Due(trains=False))


def test_what_is_done_grows_with_each_microbatch() -> None:
    async def scene() -> list[int]:
        compute = Compute()
        batches = Batches(compute)
        await audit(compute, batches)
        compute.close()
        return batches.done

    done = event_loop.run(scene())
    assert len(done) == 5 and done == list(range(done[0], done[0] + 5)), done


def test_who_stops_an_audit_waits_for_no_more_than_a_microbatch() -> None:
    """The next view's step is computed in the same thread."""

    async def scene() -> int:
        compute = Compute()
        batches = Batches(compute)
        auditing = asyncio.create_task(audit(compute, batches))
        while not batches.done:
            await asyncio.sleep(0)
        auditing.cancel()
        await asyncio.gather(auditing, return_exceptions=True)
        await compute.run(lambda: None)
        compute.close()
        return len(batches.done)

    assert event_loop.run(scene()) <= 2
