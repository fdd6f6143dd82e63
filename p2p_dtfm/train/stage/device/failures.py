"""What PyTorch raises when a device fails, or its memory is taken: this program is not at fault."""

from collections.abc import Collection

import torch

from p2p_dtfm.core.protocol.errors import DeviceFault

_FAILED: tuple[type[BaseException], ...] = (
    (torch.AcceleratorError,) if hasattr(torch, "AcceleratorError") else ()
)
"""Older versions of PyTorch have no class for it: there it looks like any other error."""
_OWN_FAULTS = ("device-side assert", "illegal", "misaligned", "invalid")
"""Words in errors that a kernel causes, and not the device."""
_NO_MEMORY = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def fault_of_device(errors: Collection[BaseException]) -> DeviceFault | None:
    """What befell the device, if these errors say nothing else."""
    if not errors or not all(_is_short(it) or _has_failed(it) for it in errors):
        return None
    failed = next((it for it in errors if not _is_short(it)), None)
    if failed is not None:
        return DeviceFault(
            f"the device has failed: {str(failed).partition(chr(10))[0]}",
            (
                "see whether its driver still answers, as after an update without a restart: "
                "nvidia-smi",
                "take part without it: --device cpu",
            ),
        )
    return DeviceFault(
        "the device has no memory left: other programs use it, or more was planned there than fits",
        (
            "close other programs that use it: nvidia-smi lists them",
            "offer less of it: --memory-gib",
            "take part without it: --device cpu",
        ),
    )


def _is_short(error: BaseException) -> bool:
    is_named_so = isinstance(error, RuntimeError) and any(it in str(error) for it in _NO_MEMORY)
    return isinstance(error, torch.OutOfMemoryError) or is_named_so


def _has_failed(error: BaseException) -> bool:
    return isinstance(error, _FAILED) and not any(it in str(error) for it in _OWN_FAULTS)
