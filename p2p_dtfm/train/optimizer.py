"""What is shared by all layers of an optimizer step: the learning rate, the norm, the clipping."""

import math

import torch
from torch import Tensor

from p2p_dtfm.core.run_spec import RunSpec

_LANES = 1 << 16
_CLIP_EPSILON = 1e-6


def learning_rate(spec: RunSpec, step: int) -> float:
    """Rate of the update that turns state `step` into state `step + 1`.

    Linear warm-up to the peak, then half a cosine down to the final rate (Loshchilov and Hutter
    2017, "SGDR", equation 5, one cycle). Rounded to 12 digits, so that C libraries whose cosines
    differ in the last bit still agree.
    """
    assert step >= 0, step
    optimizer = spec.optimizer
    peak, final, warmup = (
        optimizer.peak_learning_rate,
        optimizer.final_learning_rate,
        optimizer.warmup_steps,
    )
    if step < warmup:
        return _rounded(peak * (step + 1) / warmup)
    progress = min(1.0, (step - warmup) / max(1, spec.total_steps - warmup))
    return _rounded(final + (peak - final) * 0.5 * (1.0 + math.cos(math.pi * progress)))


def _rounded(value: float) -> float:
    return float(f"{value:.12g}")


def clip_scale(global_norm: float, clip_norm: float) -> float:
    """Factor for all gradients that keeps their global norm within `clip_norm`.

    Pascanu et al. 2013, algorithm 1, with the epsilon of `torch.nn.utils.clip_grad_norm_`.
    """
    return min(1.0, clip_norm / (global_norm + _CLIP_EPSILON))


def squared_norm(gradient: Tensor) -> float:
    """Sum of squares of a flat fp32 gradient, to the same last bit on any device.

    Squares of fp32 are exact in float64. They are added element by element into a fixed number of
    lanes, and the lanes by halving: no order is left to a library or to its thread count.
    """
    assert gradient.dim() == 1 and gradient.dtype == torch.float32
    lanes = torch.zeros(_LANES, dtype=torch.float64, device=gradient.device)
    for start in range(0, gradient.numel(), _LANES):
        squares = gradient[start : start + _LANES].detach().double().square_()
        lanes[: squares.numel()] += squares
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return float(lanes.item())
