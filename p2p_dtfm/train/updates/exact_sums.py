"""Sums in one order, whatever device and library."""

import torch
from torch import Tensor

from p2p_dtfm.train.kernels import choice, norm, processor

_LANES = 1 << 16


def squared_norm(gradient: Tensor) -> float:
    """Sum of squares of a flat fp32 gradient, to the same last bit on any device.

    Squares of fp32 are exact in float64. They are added element by element into a fixed number of
    lanes, and the lanes by halving: no order is left to a library or to its thread count.
    """
    assert gradient.dim() == 1 and gradient.dtype == torch.float32
    launcher = choice.launcher_for(gradient.device)
    if launcher:
        return norm.squared(launcher, gradient.contiguous())
    if processor.serves(gradient.device):
        return processor.squared_norm(gradient)
    # a small gradient needs fewer lanes: the others would only add zeros
    count = min(_LANES, 1 << max(0, gradient.numel() - 1).bit_length())
    lanes = torch.zeros(count, dtype=torch.float64, device=gradient.device)
    for start in range(0, gradient.numel(), _LANES):
        squares = gradient[start : start + _LANES].detach().double().square_()
        lanes[: squares.numel()] += squares
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes.item())
