"""Real engines over real streams, with another codec on each edge of the plan."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec
from p2p_dtfm.train.codecs import Codec, Turn, boundary_turn, codec_of
from p2p_dtfm.train.model.reference import ReferenceRun
from tests.core.builders import run_spec
from tests.e2e.swarm_in_process import engine_peers
from tests.e2e.test_compressed_training import STEPS, Wire, train
from tests.e2e.test_parity import even_plan, synthetic_batch

Codecs = Literal["fp32", "bf16", "int8", "rotated4", "rotated6", "subspace"]
EDGES: tuple[tuple[Codecs, Codecs], ...] = (("fp32", "bf16"), ("int8", "int8"), ("bf16", "fp32"))
FEW_LEVELS: tuple[tuple[Codecs, Codecs], ...] = (
    ("rotated4", "rotated4"),
    ("subspace", "subspace"),
    ("fp32", "rotated6"),
)


class Boundary(nn.Module):
    """A boundary forward and back through two codecs, in one process, for one microbatch after the
    other."""

    def __init__(self, spec: RunSpec, layer: int, names: tuple[str, str]) -> None:
        super().__init__()
        self.spec = spec
        self.layer = layer
        self.codecs = [codec_of(name, spec.codecs) for name in names]
        self.count = 0

    def forward(self, values: Tensor) -> Tensor:
        step, number = divmod(self.count, self.spec.microbatches_per_step)
        self.count += 1
        ways = [
            Way(codec, boundary_turn(self.spec, step, self.layer, number, back=back))
            for codec, back in zip(self.codecs, (False, True), strict=True)
        ]
        passed: Tensor = Coded.apply(values, *ways)  # type: ignore[no-untyped-call]
        return passed


class Way(NamedTuple):
    codec: Codec
    turn: Turn

    def passed(self, values: Tensor) -> Tensor:
        payload = bytearray(self.codec.encode(values.detach(), self.turn))
        return self.codec.decode(payload, tuple(values.shape), self.turn).clone()


class Coded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, there: Way, back: Way) -> Tensor:
        ctx.back = back
        return there.passed(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back.passed(gradients[0]), None, None


def reference(spec: RunSpec, names_before: Mapping[int, tuple[str, str]]) -> ReferenceRun:
    """The plain loop with these codecs before these layers."""
    run = ReferenceRun(spec, synthetic_batch(spec))
    modules = list(run.model)
    for layer, names in sorted(names_before.items(), reverse=True):
        modules.insert(layer, Boundary(spec, layer, names))
    run.model = nn.Sequential(*modules)
    return run


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("edges", "tolerance"), [(EDGES, 1e-5), (FEW_LEVELS, 3e-4)], ids=["any", "few levels"]
)
def test_losses_equal_the_plain_loop_with_the_same_codecs_on_the_same_edges(
    tmp_path: Path, edges: tuple[tuple[Codecs, Codecs], ...], tolerance: float
) -> None:
    """Each edge among four peers has what the plan says, which is not what the run names first.
    Where levels are few, a sum in another order moves some value a whole level now and then."""
    every = ("fp32", "bf16", "int8", "rotated6", "rotated4", "subspace")
    allowed = CodecSpec(activations=every, gradients=every)
    spec = run_spec().model_copy(update={"codecs": allowed})
    wire = Wire()

    async def scenario() -> tuple[list[float], Plan]:
        async with engine_peers(4, tmp_path, spec) as peers:
            for peer in peers:
                wire.watch(peer)
            even = even_plan([peer.host.peer_id for peer in peers], (4,), spec)
            pipeline = msgspec.structs.replace(even.pipelines[0], codecs=edges)
            plan = msgspec.structs.replace(even, pipelines=(pipeline,))
            return await train(peers, plan, spec), plan

    torch.set_num_threads(1)
    seen, plan = asyncio.run(asyncio.wait_for(scenario(), 120))
    values = spec.batch.microbatch * spec.model.context * spec.model.width
    crossings = STEPS * spec.microbatches_per_step
    expected_bytes: dict[tuple[str, str], int] = {}
    for names in edges:
        for kind, name in zip(("activation", "activation_gradient"), names, strict=True):
            size = codec_of(name, spec.codecs).payload_bytes(values)
            key = kind, name
            expected_bytes[key] = expected_bytes.get(key, 0) + crossings * size
    assert wire.bytes == expected_bytes
    stages = plan.pipelines[0].stages[1:]
    before = {stage.first_layer: names for stage, names in zip(stages, edges, strict=True)}
    expected = list(reference(spec, before).losses(STEPS))
    plain = list(ReferenceRun(spec, synthetic_batch(spec)).losses(STEPS))
    assert seen == pytest.approx(expected, abs=tolerance)
    assert seen != pytest.approx(plain, abs=tolerance)
    assert seen[-1] < seen[0] - 0.05, "it learns"
