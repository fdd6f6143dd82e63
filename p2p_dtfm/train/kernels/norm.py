"""The sum of squares in one order; its twin is `updates.exact_sums`."""

import torch
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import THREADS, Launcher, blocks_for

LANES = 1 << 16
_HALVING_THREADS = 1024


def squared(launcher: Launcher, values: Tensor) -> float:
    """The sum of squares of flat fp32."""
    lanes = torch.empty(LANES, dtype=torch.float64, device=values.device)
    launcher.launch(
        "norm_lanes", blocks_for(LANES), THREADS, values.detach(), values.numel(), lanes
    )
    launcher.launch("norm_halve", 1, _HALVING_THREADS, lanes)
    return float(lanes[0].item())
