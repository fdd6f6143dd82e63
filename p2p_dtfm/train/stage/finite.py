"""Whether all values of a tensor are numbers: NaN and infinity spread to whatever they meet.

What crosses a boundary between stages is bounded as well. From finite numbers that are large enough
the next stage would make some that are not finite, and that stage would stand still.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.kernels import processor
from p2p_dtfm.train.model.gpt import layer_count

BLOCK_ELEMENTS = 1 << 18
"""Elements that are checked and then copied or added at once. They are 1 MiB of fp32, so they come
from memory only once; PyTorch's calls cost next to nothing beside it."""
FIRST_LIMIT, MOST_TIMES = 2.0**20, 2.0**30
"""The limit between the first two stages, and how many times larger the limit between the last two
is. For gradients it is the other way round. So a stage that is given values within bounds sends on
values within bounds, unless its parameters have grown beyond all measure. The square of the largest
value is finite in fp32, and so is the sum of as many squares as a microbatch has."""
CODEC_TIMES = 2.0
"""How much larger a codec may make values."""
PART_LIMIT = 2.0**110
"""The limit of a gradient that is added to others. Two parts above it may have no finite sum."""


class NotFinite(Exception):
    """Finite numbers have led to one that is not finite: the run diverges, or was given poison."""


def is_finite(values: Tensor) -> bool:
    """Whether all values are finite. Reads the tensor once, unless their sum is too large."""
    if processor.takes(values):
        return processor.is_within(values, processor.LARGEST)
    if bool(torch.isfinite(values.detach().sum())):
        return True
    return bool(torch.isfinite(values).all())


def boundary_limit(spec: RunSpec, layer: int, *, back: bool) -> float:
    """The limit of the values that the stage before sends over the boundary to this layer. With
    `back`, the limit of their gradient that it gets back."""
    layers = layer_count(spec)
    depth = (layers - layer if back else layer) / layers
    return float(FIRST_LIMIT * MOST_TIMES**depth)


def is_within(values: Tensor, limit: float) -> bool:
    """Whether all values are numbers of at most the limit's size. Reads the tensor once."""
    if values.numel() == 0:
        return True
    if processor.takes(values):
        return processor.is_within(values, limit)
    least, most = torch.aminmax(values.detach())  # either is NaN where a value is
    return bool((least >= -limit) & (most <= limit))


def copy_if_finite(values: Tensor, target: Tensor) -> bool:
    """Copies `values`, and returns whether all are finite. Both tensors are flat. If not all are
    finite, any part of the target may have been written."""
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
    """Writes first + second + third and so on, all flat, and returns whether all sums are finite.
    The target may be one of the parts, and is the only part if there is just one; other parts stay
    as they are. If not all sums are finite, any part of the target may have been written."""
    room = torch.empty(min(BLOCK_ELEMENTS, len(target)))
    cut = [each.split(BLOCK_ELEMENTS) for each in (*parts, target)]
    for sums, *others, total in zip(*cut, strict=True):
        if not others and not is_finite(total):
            return False
        for number, part in enumerate(others, 1):
            is_last = number == len(others)
            out = total if is_last else room[: len(total)]
            if not _add(sums, part, out):
                return False  # the last sums would not be finite either
            sums = out
    return True


def _add(first: Tensor, second: Tensor, total: Tensor) -> bool:
    """Writes the sums; returns whether all of them are finite."""
    if processor.takes(first, second, total):
        return processor.add(first, second, total)
    return is_finite(torch.add(first, second, out=total))
