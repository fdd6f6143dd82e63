"""Whether all values of a tensor are numbers: NaN and infinity spread to whatever they meet."""

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1 << 18
"""1 MiB of fp32: what is looked at and then copied or added comes from memory once, and PyTorch's
calls cost next to nothing beside it."""


class NotFinite(Exception):
    """Finite numbers have come to one here that is not: the run diverges, or was given poison."""


def is_finite(values: Tensor) -> bool:
    """Reads the tensor once, unless the sum of its finite values is too large."""
    if bool(torch.isfinite(values.detach().sum())):
        return True
    return bool(torch.isfinite(values).all())


def copy_if_finite(values: Tensor, target: Tensor) -> bool:
    """Both flat. If not all are finite, any part of the target may have been written."""
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
        for number, part in enumerate(others, 1):
            is_last = number == len(others)
            sums = torch.add(sums, part, out=total if is_last else room[: len(total)])
        if not is_finite(total):
            return False
    return True
