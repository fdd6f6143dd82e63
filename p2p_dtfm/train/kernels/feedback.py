"""Keeps what a lossy codec loses as owed; its twin is in `stage.segment_reduction`."""

from torch import Tensor

from p2p_dtfm.train.kernels.launcher import Launcher, over_elements


def add(launcher: Launcher, values: Tensor, owed: Tensor) -> None:
    """Add what is owed from before to the values, in place."""
    over_elements(launcher, "feedback_add", values.numel(), values, owed, values.numel())


def owe(launcher: Launcher, values: Tensor, decoded: Tensor, owed: Tensor) -> None:
    """Write into `owed` what the decoded values lack."""
    over_elements(launcher, "feedback_owe", values.numel(), values, decoded, values.numel(), owed)
