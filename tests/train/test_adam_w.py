"""AdamW in operations that are rounded exactly: PyTorch's steps, and the same bits anywhere."""

import math
from collections.abc import Iterator

import numpy
import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.updates import adam_w
from p2p_dtfm.train.updates.adam_w import AdamW

SHAPES = ((300, 70), (70,), (5,), (9, 9))
COUNT = sum(math.prod(shape) for shape in SHAPES)
STEPS = 30


def gradients(seed: int) -> Iterator[Tensor]:
    """Gradients of many magnitudes, denormal ones and zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        exponents = torch.randint(-140, 2, (COUNT,), generator=generator)
        yield torch.ldexp(torch.randn(COUNT, generator=generator), exponents)


def test_it_makes_the_steps_of_torch(spec: RunSpec) -> None:
    ours = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    parts = ours.split([math.prod(shape) for shape in SHAPES])
    theirs = [
        torch.nn.Parameter(part.clone().view(shape))
        for part, shape in zip(parts, SHAPES, strict=True)
    ]
    settings = spec.optimizer
    groups = [
        {"params": [theirs[0], theirs[3]], "weight_decay": settings.weight_decay},
        {"params": theirs[1:3], "weight_decay": 0.0},
    ]
    betas = (settings.beta1, settings.beta2)
    optimizer = torch.optim.AdamW(groups, betas=betas, eps=settings.epsilon, lr=0.01)
    stepping = AdamW(spec, SHAPES, torch.zeros(2, COUNT), 0)
    for gradient in gradients(2):
        for parameter, part in zip(
            theirs, gradient.split([p.numel() for p in theirs]), strict=True
        ):
            parameter.grad = part.clone().view_as(parameter)
        optimizer.step()
        stepping.step(ours, gradient.clone(), 0.01)
    expected = torch.cat([parameter.detach().reshape(-1) for parameter in theirs])
    assert torch.allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_every_operation_is_rounded_by_itself(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the result is the same, to the last bit, in numpy, and in parts of any size."""
    start = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    results = []
    for chunk in (1 << 16, 1000, 7):
        monkeypatch.setattr(adam_w, "CHUNK_ELEMENTS", {"cpu": chunk})
        parameters, moments = start.clone(), torch.zeros(2, COUNT)
        stepping = AdamW(spec, SHAPES, moments, 0)
        for gradient in gradients(2):
            stepping.step(parameters, gradient.clone(), 0.01)
        results.append(torch.cat([parameters, *moments]))
    expected = _in_numpy(spec, start)
    for result in results:
        assert result.numpy().tobytes() == expected.tobytes()


def _in_numpy(spec: RunSpec, start: Tensor) -> numpy.ndarray:
    settings, single = spec.optimizer, numpy.float32
    value = start.numpy().copy()
    decays = numpy.concatenate([numpy.full(math.prod(s), len(s) > 1) for s in SHAPES])
    first, second = numpy.zeros_like(value), numpy.zeros_like(value)
    for number, gradient in enumerate(gradients(2), start=1):
        slope = gradient.numpy()
        correction1 = adam_w.rounded(1.0 - settings.beta1**number)
        correction2 = adam_w.rounded(1.0 - settings.beta2**number)
        scale2 = single(adam_w.rounded(1.0 / math.sqrt(correction2)))
        second = second * single(settings.beta2) + (slope * slope) * single(1 - settings.beta2)
        first = first * single(settings.beta1) + slope * single(1 - settings.beta1)
        quotient = first / (numpy.sqrt(second) * scale2 + single(settings.epsilon))
        kept = value * single(1.0 - 0.01 * settings.weight_decay)
        value = numpy.where(decays, kept, value) - quotient * single(0.01 / correction1)
    return numpy.concatenate([value, first, second])
