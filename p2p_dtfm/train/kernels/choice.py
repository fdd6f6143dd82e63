"""Kernels or torch twins: the one place where that is chosen."""

import logging
from functools import cache

import torch

from p2p_dtfm.train.kernels.known_answer import KNOWN_ANSWER, answer_of
from p2p_dtfm.train.kernels.launcher import Launcher

_log = logging.getLogger(__name__)


@cache
def launcher_for(device: torch.device) -> Launcher | None:
    """A launcher of kernels whose answer on that device is the known one. None: the torch twins
    serve.

    There is one for a CUDA device if the extra `cuda` (CuPy) is installed.
    """
    if device.type != "cuda":
        return None
    try:
        from p2p_dtfm.train.kernels.device_launcher import DeviceLauncher
    except ImportError:
        return None
    try:
        return checked(DeviceLauncher(device), device)
    except Exception as error:  # noqa: BLE001 - whatever CuPy raises, the twins serve
        _log.warning("no kernels on %s, PyTorch's operations serve: %s", device, error)
        return None


def checked(launcher: Launcher, device: torch.device) -> Launcher | None:
    """The launcher; None if its kernels give other bits on the device."""
    answer = answer_of(launcher, device)
    if answer == KNOWN_ANSWER:
        return launcher
    _log.warning(
        "the kernels on %s give other bits than they should (%s), PyTorch's operations serve",
        device,
        answer,
    )
    return None
