"""Whether all values of a tensor are numbers: NaN and infinity spread to whatever they meet.

What crosses a boundary between stages is bounded as well: of finite numbers that are large enough
the next stage makes some that are not, and would be the one that stands still.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.kernels import processor
from p2p_dtfm.train.model.gpt import layer_count

BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32: what is looked at and then copied or added comes from memory once, and PyTorch's
calls cost next to nothing beside it."""
FIRST_LIMIT, MOST_TIMES = 2.0**20, 2.0**30
"""Between the first two stages, and so many times as much between the last two; for gradients the
other way round. So who is given what is within bounds sends on what is, unless its parameters have
grown beyond all measure themselves. The square of the largest is finite in fp32, and so is the sum
of as many as a microbatch has."""
CODEC_TIMES = 2.0
"""What a codec may make larger."""
PART_LIMIT = 2.0**110
"""Of a gradient that is added to others: from two that were larger no sum need follow."""


class NotFinite(Exception):
    """Finite numbers have come to one here that is not: the run diverges, or was given poison."""


def is_finite(values: Tensor) -> bool:
    """Reads the tensor once, unless the sum of its finite values is too large."""
    if processor.takes(values):
        return processor.is_within(values, processor.LARGEST)
    if bool(torch.isfinite(values.detach().sum())):
        return True
    return bool(torch.isfinite(values).all())


def boundary_limit(spec: RunSpec, layer: int, *, back: bool) -> float:
    """Of the values that whoever has the stage before sends over the boundary to this layer; or, of
    their gradient, that it gets back."""
    layers = layer_count(spec)
    depth = (layers - layer if back else layer) / layers
    return float(FIRST_LIMIT * MOST_TIMES**depth)


def is_within(values: Tensor, limit: float) -> bool:
    """Whether all are numbers, and none is larger. Reads the tensor once."""
    if values.numel() == 0:
        return True
    if processor.takes(values):
        return processor.is_within(values, limit)
    least, most = torch.aminmax(values.detach())  # either is NaN where a value is
    return bool((least >= -limit) & (most <= limit))


def copy_if_finite(values: Tensor, target: Tensor) -> bool:
    """Both flat. If not all are finite, any part of the target may have been written."""
    if processor.takes(values, target):
        return processor.copy(values, target)
    if values.device != target.device:
        finite = is_finite(values)
        if finite:
            target.copy_(values)
        return finite
    blocks = zip(values.split(BLOCK_ELEMENTS), target.split(BLOCK_ELEMENTS), strict=True)
    for block, its_target in blocks:
        if not is_finite(block):
            return False
        its_target.copy_(block)
    return True


def add_if_finite(parts: Sequence[Tensor], target: Tensor) -> bool:
    """first + second + third and so on, all flat. The target may be one of the parts, and is the
    only one if there is one; the others stay as they are. If not all sums are finite, any part of
    the target may have been written."""
    room = torch.empty(min(BLOCK_ELEMENTS, len(target)))
    cut = [each.split(BLOCK_ELEMENTS) for each in (*parts, target)]
    for sums, *others, total in zip(*cut, strict=True):
        if not others and not is_finite(total):
            return False
        for number, part in enumerate(others, 1):
            is_last = number == len(others)
            out = total if is_last else room[: len(total)]
            if not _add(sums, part, out):
                return False  # nor would the last sums be
            sums = out
    return True


def _add(first: Tensor, second: Tensor, total: Tensor) -> bool:
    """Whether all sums are finite."""
    if processor.takes(first, second, total):
        return processor.add(first, second, total)
    return is_finite(torch.add(first, second, out=total))
