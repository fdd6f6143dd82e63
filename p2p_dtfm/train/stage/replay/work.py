"""A stage's work of a step, computed once more from the parameters that it began with.

Bits depend on the arithmetic (`arithmetic`) and on the number of threads. So a replay is asked of
who has the same arithmetic, and is given the threads that the work had.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_layer
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.stage_runner import StageRunner


class Replayed(NamedTuple):
    gradients: dict[int, Tensor]
    """By layer, flat fp32."""
    loss_sum: float
    """0 without the head."""


class _SharedLayer:
    """A layer with the parameters of a state and gradients of its own."""

    def __init__(self, spec: RunSpec, state: LayerState) -> None:
        self.module = build_layer(spec, state.layer, "meta")
        self.device = state.device
        self.gradient = torch.zeros_like(state.parameters)
        start = 0
        for name, parameter in list(self.module.named_parameters()):
            here = slice(start, start + parameter.numel())
            holder, _, last = name.rpartition(".")
            owner = self.module.get_submodule(holder)
            mine = torch.nn.Parameter(state.parameters[here].view(parameter.shape))
            mine.grad = self.gradient[here].view(parameter.shape)
            setattr(owner, last, mine)
            start = here.stop


def replay(
    spec: RunSpec,
    states: Mapping[int, LayerState],
    microbatches: Sequence[int],
    batch: Callable[[int], tuple[Tensor, Tensor]],
    threads: int,
) -> Replayed:
    """Of a stage that is the whole model. Compute thread; `states` stay as they are."""
    layers = {layer: _SharedLayer(spec, state) for layer, state in sorted(states.items())}
    runner = StageRunner(spec, cast(dict[int, LayerState], layers), recompute=True)
    assert runner.has_embedding and runner.has_head
    before = torch.get_num_threads()
    losses: dict[int, float] = {}
    try:
        torch.set_num_threads(threads)
        for number in microbatches:
            losses[number] = float(cast(float, runner.forward(number, *batch(number))))
            runner.backward(number)
    finally:
        torch.set_num_threads(before)
    return Replayed({n: layer.gradient for n, layer in layers.items()}, sum(losses.values(), 0.0))


class SegmentParts:
    """One holder's gradient of a segment, cut into its chunks. Bytes as a lossless codec sends."""

    def __init__(self, gradients: Sequence[Tensor], chunks: Chunks) -> None:
        self._gradients = [gradient.detach().cpu() for gradient in gradients]
        self._chunks = chunks

    def part(self, chunk: int) -> Tensor:
        """A copy."""
        start, end = self._chunks.bounds[chunk]
        pieces, at = [], 0
        for gradient in self._gradients:
            length = gradient.numel()
            pieces.append(gradient[max(0, start - at) : max(0, min(length, end - at))])
            at += length
        return torch.cat(pieces)

    def payload(self, chunk: int) -> bytes:
        return bytes_of(self.part(chunk))

    def digests(self) -> tuple[bytes, ...]:
        """Of all chunks."""
        return tuple(chunk_digest(self.payload(n)) for n in range(len(self._chunks.bounds)))


def added(parts: Sequence[Tensor]) -> Tensor:
    """In pipeline order, as who sums a chunk adds them."""
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def from_bytes(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)


def bytes_of(values: Tensor) -> bytes:
    return bytes(cast(Any, values.numpy()).data.cast("B"))


def chunk_digest(payload: Any) -> bytes:
    """Names a blob of these bytes. Releases the interpreter's lock."""
    return hashlib.blake2b(memoryview(payload).cast("B"), digest_size=32).digest()
