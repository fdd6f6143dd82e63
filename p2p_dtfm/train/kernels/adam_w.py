"""AdamW in one pass over the memory; its twin is `updates.adam_w`."""

from typing import NamedTuple

from torch import Tensor

from p2p_dtfm.train.kernels.launcher import Launcher, over_elements


class Scalars(NamedTuple):
    """Numbers of one step. `decay` is 1 for parameters that do not decay."""

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    scale2: float
    epsilon: float
    decay: float
    step_size: float


def step(
    launcher: Launcher, values: Tensor, slopes: Tensor, moments: tuple[Tensor, Tensor], of: Scalars
) -> None:
    """Change fp32 `values` and `moments` in place."""
    count = values.numel()
    over_elements(launcher, "adam_w_step", count, values, slopes, *moments, count, *of)
