"""Boundary tensors between an accelerator and the host, copied while it computes.

Copies go over a stream of their own, into and out of memory that the accelerator reaches directly
(pinned). If tensors are the host's anyway, nothing is copied.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Leaving:
    """A tensor on its way to the host."""

    on_host: Tensor
    copied: Any = None
    """A CUDA event; None if nothing is copied."""

    def wait(self) -> Tensor:
        """Gives the tensor once it is there. Blocks the calling thread, not the accelerator."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.on_host


class HostCopies:
    """Copies of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = _stream_for_copies(device) if device.type == "cuda" else None

    def to_host(self, tensor: Tensor) -> Leaving:
        """Begin a copy, after all that this thread has given to the accelerator until now. What
        was decoded here, to be sent in another codec, is on the host already."""
        if self._stream is None or tensor.device.type == "cpu":
            return Leaving(tensor)
        computing = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(computing)
        on_host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        with torch.cuda.stream(self._stream):
            on_host.copy_(tensor, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        tensor.record_stream(self._stream)
        return Leaving(on_host, copied)

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on the device. What this thread computes from now on sees the whole tensor."""
        if self._stream is None or tensor.device == self.device:
            return tensor.to(self.device)
        with torch.cuda.stream(self._stream):
            here = tensor.pin_memory().to(self.device, non_blocking=True)
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._stream)
        here.record_stream(computing)
        return here


@functools.cache
def _stream_for_copies(device: torch.device) -> Any:
    """The one stream for copies of a process. PyTorch has 32 and gives them out in turn. A stage
    that took one for itself would in time be given the one in which another thread records."""
    return torch.cuda.Stream(device)


def kept_on_host(flat: Tensor) -> Tensor:
    """A copy of flat fp32 in the host's memory, wherever the original is."""
    return host_room(flat.numel(), flat.device).copy_(flat)


def host_room(elements: int, device: torch.device) -> Tensor:
    """Flat fp32 on the host, not initialised. `device` copies into it at its full rate."""
    return torch.empty(elements, pin_memory=device.type == "cuda")
