"""Real engines over real streams, with another codec on each edge of the plan."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec
from p2p_dtfm.train.codecs import Codec, codec_of
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import engine_peers
from tests.e2e.test_compressed_training import STEPS, Wire, train
from tests.e2e.test_parity import even_plan, synthetic_batch

EDGES = (("fp32", "bf16"), ("int8", "int8"), ("bf16", "fp32"))


class Boundary(nn.Module):
    """There and back through two codecs, in one process."""

    def __init__(self, activation: Codec, gradient: Codec) -> None:
        super().__init__()
        self.codecs = activation, gradient

    def forward(self, values: Tensor) -> Tensor:
        passed: Tensor = Coded.apply(values, *self.codecs)  # type: ignore[no-untyped-call]
        return passed


class Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Codec, back: Codec) -> Tensor:
        ctx.back = back
        return passed(there, values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return passed(ctx.back, gradients[0]), None, None


def passed(codec: Codec, values: Tensor) -> Tensor:
    return codec.decode(bytearray(codec.encode(values.detach())), tuple(values.shape)).clone()


def reference(spec: RunSpec, plan: Plan) -> ReferenceRun:
    """The plain loop, with the same codecs between the same layers."""
    run = ReferenceRun(spec, synthetic_batch(spec))
    modules = list(run.model)
    (pipeline,) = plan.pipelines
    for stage, names in reversed(list(zip(pipeline.stages[1:], pipeline.codecs, strict=True))):
        modules.insert(stage.first_layer, Boundary(*(codec_of(n, spec.codecs) for n in names)))
    run.model = nn.Sequential(*modules)
    return run


@pytest.mark.nightly
def test_losses_equal_the_plain_loop_with_the_same_codecs_on_the_same_edges(
    tmp_path: Path,
) -> None:
    """Four peers; each edge has what the plan says, which is not what the run names first."""
    allowed = CodecSpec.model_validate({"activations": "auto", "gradients": "auto"})
    spec = run_spec().model_copy(update={"codecs": allowed})
    wire = Wire()

    async def scenario() -> tuple[list[float], Plan]:
        async with engine_peers(4, tmp_path, spec) as peers:
            for peer in peers:
                wire.watch(peer)
            even = even_plan([peer.host.peer_id for peer in peers], (4,), spec)
            pipeline = msgspec.structs.replace(even.pipelines[0], codecs=EDGES)
            plan = msgspec.structs.replace(even, pipelines=(pipeline,))
            return await train(peers, plan, spec), plan

    torch.set_num_threads(1)
    seen, plan = asyncio.run(asyncio.wait_for(scenario(), 120))
    values = spec.batch.microbatch * spec.model.context * spec.model.width
    crossings = STEPS * spec.microbatches_per_step
    expected_bytes: dict[tuple[str, str], int] = {}
    for names in EDGES:
        for kind, name in zip(("activation", "activation_gradient"), names, strict=True):
            size = codec_of(name, spec.codecs).payload_bytes(values)
            key = kind, name
            expected_bytes[key] = expected_bytes.get(key, 0) + crossings * size
    assert wire.bytes == expected_bytes
    expected = list(reference(spec, plan).losses(STEPS))
    plain = list(ReferenceRun(spec, synthetic_batch(spec)).losses(STEPS))
    assert seen == pytest.approx(expected, abs=1e-5)
    assert seen != pytest.approx(plain, abs=1e-5)
    assert seen[-1] < seen[0] - 0.05, "it learns"
