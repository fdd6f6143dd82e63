"""A card that repeats its bits, in runs where another card of its kind may compute its work again.

By default a card adds up some sums (attention's backward, for one) in the order in which its
threads happen to end. So the same work has other last bits each time. PyTorch has kernels that
repeat their bits, for about a tenth more time (decision 78).
"""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_timed_layer, layer_count
from p2p_dtfm.train.model.precision import autocast
from p2p_dtfm.train.stage.device.given_gradient import backward_from
from p2p_dtfm.train.stage.device.trial import TrialShape, trial_pass

_log = logging.getLogger(__name__)

CUBLAS_SETTING = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_REPEATS = ":4096:8"
"""As much memory as PyTorch gives cuBLAS on a large card in any case, in pieces of fixed sizes."""


def let_cublas_repeat() -> None:
    """Call it before cuBLAS is first used, which looks at the setting only then. It changes nothing
    if somebody has chosen the setting."""
    os.environ.setdefault(CUBLAS_SETTING, _CUBLAS_REPEATS)


class _Asked:
    """Counts who asks for repeating kernels. PyTorch's setting is one for all threads, and a stage
    trains in one thread while another one audits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bodies = 0
        self._before = (False, True)

    def begin(self) -> None:
        settings: Any = torch.utils.deterministic
        with self._lock:
            if not self._bodies:
                enabled = torch.are_deterministic_algorithms_enabled()
                self._before = enabled, settings.fill_uninitialized_memory
                settings.fill_uninitialized_memory = False
                torch.use_deterministic_algorithms(True)
            self._bodies += 1

    def end(self) -> None:
        settings: Any = torch.utils.deterministic
        with self._lock:
            self._bodies -= 1
            if not self._bodies:
                enabled, settings.fill_uninitialized_memory = self._before
                torch.use_deterministic_algorithms(enabled)


_asked = _Asked()


@contextlib.contextmanager
def repeating_kernels() -> Iterator[None]:
    """The body's work, in whichever thread, gets kernels that repeat their bits; so does all other
    work meanwhile. Raises `RuntimeError` where PyTorch has no such kernel. Memory is not filled
    before it is written: that is no use to code that writes all of it."""
    _asked.begin()
    try:
        yield
    finally:
        _asked.end()


def kernels_for(spec: RunSpec, device: torch.device) -> AbstractContextManager[None]:
    """Around a stage's passes on the device."""
    is_needed = device.type == "cuda" and repeats_bits(spec, device)
    return repeating_kernels() if is_needed else contextlib.nullcontext()


@functools.lru_cache(maxsize=16)
def repeats_bits(spec: RunSpec, device: torch.device) -> bool:
    """Whether a stage's passes on the device give the same bits each time. On a processor they
    always do. On a card they do if the run asks for it and PyTorch has kernels for all that its
    layers compute. Runs that list their layers are not tried."""
    if device.type == "cpu":
        return True
    if not spec.audit.rate or spec.layers:
        return False
    try:
        with repeating_kernels():
            for layer in (0, 1, layer_count(spec) - 1):
                _pass(spec, layer, device)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        _log.warning("no work of %s can be audited: %s", device, error)
        return False
    return True


def _pass(spec: RunSpec, layer: int, device: torch.device) -> None:
    """Forward and backward of one sequence: whether there are kernels is the same for more of
    them."""
    module = build_timed_layer(spec, layer, device)
    with torch.no_grad():
        for values in module.parameters():
            values.fill_(0.01)
    with autocast(spec, device):
        result = trial_pass(spec, layer, module, TrialShape(1, spec.model.context), device)()
    backward_from(result, torch.ones_like(result))
