"""The floating-point type in which a stage's products are computed.

Parameters, gradients, optimizer and everything that travels are fp32 everywhere; autocast computes
matrix products and attention in fewer bits. "auto" takes bf16 where the device has units for it,
and fp32 elsewhere. fp16 is not among the choices. Gradients of a mean over a step's tokens lie
below its least number, so it would need a scale that all stages agree on.
"""

import contextlib
from contextlib import AbstractContextManager

import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec


def compute_type(spec: RunSpec, device: torch.device) -> torch.dtype:
    """The type of matrix products on this device."""
    choice = spec.compute.precision
    if choice == "auto":
        has_units = device.type == "cuda" and torch.cuda.is_bf16_supported(
            including_emulation=False
        )
        choice = "bf16" if has_units else "fp32"
    return torch.bfloat16 if choice == "bf16" else torch.float32


def autocast(spec: RunSpec, device: torch.device) -> AbstractContextManager[object]:
    """A new context for a forward; its backward needs none."""
    chosen = compute_type(spec, device)
    if chosen is torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=chosen)
