"""Real engines over real streams whose stages send each other few channels of the stream."""

import asyncio
from pathlib import Path

import pytest
import torch

from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import engine_peers
from tests.e2e.test_codecs_on_edges import reference
from tests.e2e.test_parity import (
    STEPS,
    TOLERANCE,
    assert_replicas_are_equal,
    even_plan,
    plain_losses,
    train,
)

MODEL = {"layers": 4, "width": 32, "heads": 2, "context": 32, "vocabulary": 256}
MOVED = 3e-3
"""The tolerance of a loss where the codec has few levels: replicas add in another order than the
plain loop."""


@pytest.mark.parametrize(
    ("stage_counts", "codec"), [((3,), "fp32"), ((2, 1), "fp32"), ((2,), "int8")], ids=str
)
def test_the_loss_equals_the_plain_loop(
    stage_counts: tuple[int, ...], codec: str, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    codecs = {"activations": codec, "gradients": codec}
    spec = run_spec(model={**MODEL, "written_width": 12}, codecs=codecs)

    async def run() -> tuple[list[float], list[int]]:
        async with engine_peers(sum(stage_counts), tmp_path, spec, False) as peers:
            plan = even_plan([peer.host.peer_id for peer in peers], stage_counts, spec)
            losses = await train(peers, plan, spec)
            assert_replicas_are_equal(peers, plan)
            assert not any(peer.faults for peer in peers)
            return losses, [stage.first_layer for stage in plan.pipelines[0].stages[1:]]

    losses, cuts = asyncio.run(run())
    lossless = codec == "fp32"
    coded = {cut: (codec, codec) for cut in cuts}
    expected = plain_losses(spec) if lossless else tuple(reference(spec, coded).losses(STEPS))
    off = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    assert off < (TOLERANCE if lossless else MOVED), off
    assert expected[-1] < expected[0], "the plain loop itself must learn"
