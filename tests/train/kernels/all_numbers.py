"""Numbers of all kinds, what AdamW makes of them, and when two results are the same."""

import math

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.updates.adam_w import AdamW

RUN = 4096
"""How many neighbours are of one kind, so that some blocks have no NaN."""


def numbers(count: int, seed: int = 0) -> Tensor:
    """Runs of values: normal at all scales, of any bits (NaN and infinities among them), finite,
    next to zero, zeros of both signs, and few different ones."""
    generator = torch.Generator().manual_seed(seed)

    def any_bits() -> Tensor:
        return torch.randint(-(1 << 31), 1 << 31, (RUN,), generator=generator).to(torch.int32)

    runs = []
    for place in range(-(-count // RUN)):
        scale = torch.randint(-140, 120, (1,), generator=generator)
        run = torch.randn(RUN, generator=generator).double() * torch.exp2(scale.double())
        found = run.to(torch.float32)
        kind = (place + seed) % 8
        if kind == 1:
            found = any_bits().view(torch.float32)
            found[:3] = torch.tensor([math.inf, -math.inf, math.nan])
        elif kind == 2:
            found = any_bits().view(torch.float32)
            found = torch.where(found.isfinite(), found, -0.0)
        elif kind == 3:
            found = (any_bits() & -0x7F800001).view(torch.float32)
        elif kind == 4:
            found = torch.where(any_bits() > 0, -0.0, 0.0)
        elif kind == 5:
            found = found.sign() * torch.where(any_bits() > 0, 3e38, 0.5)
        runs.append(found)
    return torch.cat(runs)[:count].clone()


def assert_same(found: Tensor, wanted: Tensor) -> None:
    """Require the same bits, except that any NaN counts as another: processors write different
    ones."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    is_nan = wanted.isnan()
    assert torch.equal(found.isnan(), is_nan)
    kind = torch.int32 if wanted.dtype == torch.float32 else torch.int64
    assert torch.equal(found.view(kind)[~is_nan], wanted.view(kind)[~is_nan])


def updated(spec: RunSpec, shapes: list[tuple[int, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters and both moments, after two steps of AdamW over such numbers."""
    count = sum(map(math.prod, shapes))
    values, moments = numbers(count, 2), (torch.zeros(count), torch.zeros(count))
    stepping = AdamW(spec, shapes, moments, 0)
    for seed in (3, 4):
        stepping.step(values, numbers(count, seed), 0.01)
    return values, *moments
