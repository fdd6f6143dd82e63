"""AdamW (Loshchilov and Hutter 2019) over flat buffers, to the same last bit on any device.

Replicas must not drift apart, whatever processors they have. So a step is made of sums, products
and quotients of tensors. Each is an operation by itself, which IEEE 754 rounds exactly. Fused
operations round once where separate ones round twice. Some devices divide by a number by
multiplying with its reciprocal. On others PyTorch's square root of fp32 is off by a bit. See
`docs/decisions/0019-states-by-exact-arithmetic.md`.
"""

import math
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.kernels import adam_w as kernel
from p2p_dtfm.train.kernels import choice, processor

CHUNK_ELEMENTS = {"cpu": 1 << 16}
"""Elements of a chunk. So many parameters, gradients, moments and scratch are 1.25 MiB: they stay
in the cache over the dozen operations of a step."""
CHUNK_ELEMENTS_ELSEWHERE = 1 << 24
"""Elements of a chunk on an accelerator, which costs more to ask."""
SIGNIFICANT_DIGITS = 12
"""Digits of scalars. C libraries whose powers and cosines differ in the last bit agree on these."""


class _Updated(NamedTuple):
    """Elements that are updated together. `decaying`: parts that decay, counted from the start."""

    start: int
    end: int
    decaying: list[slice]


def rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


class AdamW:
    """Steps of one layer.

    `moments`: first and second, fp32 [elements] each, changed in place. `shapes`: those of the
    layer's tensors, in the order of the buffers; only matrices decay.
    """

    def __init__(
        self,
        spec: RunSpec,
        shapes: Iterable[tuple[int, ...]],
        moments: tuple[Tensor, Tensor],
        steps_made: int,
        weight_decay: float | None = None,
    ) -> None:
        """`weight_decay`: the decay of these tensors, if it is another than the run's."""
        self.steps_made = steps_made
        self._settings = spec.optimizer
        self._weight_decay = spec.optimizer.weight_decay if weight_decay is None else weight_decay
        self._first, self._second = moments
        device = self._first.device
        self._launcher = choice.launcher_for(device)
        self._is_processors = not self._launcher and processor.serves(device)
        """With neither a launcher nor the processor's kernels, the operations below are used."""
        has_kernel = self._launcher is not None or self._is_processors
        limit = CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_ELSEWHERE)
        limit = max(1, self._first.numel()) if self._is_processors else limit
        # a kernel has one decay; operations cost more than the work on a norm or a bias
        together = 0 if has_kernel else limit
        self._chunks = _grouped(_runs(shapes, limit), together)
        largest = max((chunk.end - chunk.start for chunk in self._chunks), default=0)
        self._scratch_elements = 0 if has_kernel else largest

    @torch.no_grad()
    def step(self, parameters: Tensor, gradient: Tensor, learning_rate: float) -> None:
        """Change `parameters`, fp32 [elements], in place. `gradient` is used up."""
        settings = self._settings
        self.steps_made += 1
        beta1, beta2 = settings.beta1, settings.beta2
        correction1 = rounded(1.0 - beta1**self.steps_made)
        correction2 = rounded(1.0 - beta2**self.steps_made)
        step_size = learning_rate / correction1
        scale2 = rounded(1.0 / math.sqrt(correction2))
        decay = 1.0 - learning_rate * self._weight_decay
        if self._launcher or self._is_processors:
            betas = (beta1, 1.0 - beta1, beta2, 1.0 - beta2)
            scalars = kernel.Scalars(*betas, scale2, settings.epsilon, decay, step_size)
            self._step_by_kernel(parameters, gradient, scalars)
            return
        scratches = torch.empty(self._scratch_elements, device=self._first.device)
        for start, end, decaying in self._chunks:
            value, slope = parameters[start:end], gradient[start:end]
            first, second = self._first[start:end], self._second[start:end]
            scratch = scratches[: end - start]
            torch.mul(slope, slope, out=scratch)
            second.mul_(beta2).add_(scratch.mul_(1.0 - beta2))
            first.mul_(beta1).add_(slope.mul_(1.0 - beta1))
            _root(second, scratch)
            scratch.mul_(scale2).add_(settings.epsilon)
            torch.div(first, scratch, out=scratch)
            for part in decaying:
                value[part].mul_(decay)
            value.sub_(scratch.mul_(step_size))

    def _step_by_kernel(self, parameters: Tensor, gradient: Tensor, of: kernel.Scalars) -> None:
        moments = (self._first, self._second)
        if not self._launcher:
            spans = [(start, end, bool(decaying)) for start, end, decaying in self._chunks]
            processor.step(parameters, gradient, moments, spans, of)
            return
        for start, end, decaying in self._chunks:
            value, slope = parameters[start:end], gradient[start:end]
            parts = (self._first[start:end], self._second[start:end])
            kept = of if decaying else of._replace(decay=1.0)
            kernel.step(self._launcher, value, slope, parts, kept)


def _root(numbers: Tensor, out: Tensor) -> None:
    """The square root, exactly rounded. `torch.sqrt` of fp32 is not, on some devices.

    The rounded root of float64 is: no fp32 number has a root so near to the middle between two
    others.
    """
    if numbers.device.type == "cpu":
        numpy.sqrt(numbers.numpy(), out=out.numpy())
    else:
        out.copy_(numbers.double().sqrt_())


def _grouped(runs: Iterable[tuple[int, int, bool]], limit_elements: int) -> list[_Updated]:
    """Neighbouring parts together, as long as they have at most so many elements."""
    chunks = list[_Updated]()
    for start, end, decays in runs:
        if chunks and end - chunks[-1].start <= limit_elements:
            chunks[-1] = chunks[-1]._replace(end=end)
        else:
            chunks.append(_Updated(start, end, []))
        if decays:
            first = chunks[-1].start
            chunks[-1].decaying.append(slice(start - first, end - first))
    return chunks


def _runs(
    shapes: Iterable[tuple[int, ...]], limit_elements: int
) -> Iterable[tuple[int, int, bool]]:
    """Parts of at most so many elements: start, end, and whether the part decays."""
    start = 0
    for decays, alike in groupby(shapes, key=lambda shape: len(shape) >= 2):
        run_end = start + sum(math.prod(shape) for shape in alike)
        while start < run_end:
            end = min(start + limit_elements, run_end)
            yield start, end, decays
            start = end
