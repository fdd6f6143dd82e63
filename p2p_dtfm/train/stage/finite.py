"""Whether all values of a tensor are numbers: NaN and infinity spread to whatever they meet."""

import torch
from torch import Tensor


class NotFinite(Exception):
    """Finite numbers have come to one here that is not: the run diverges, or was given poison."""


def is_finite(values: Tensor) -> bool:
    """Reads the tensor once, unless the sum of its finite values is too large."""
    if bool(torch.isfinite(values.detach().sum())):
        return True
    return bool(torch.isfinite(values).all())
