"""fp32 tensors as the bytes that travel, without a copy where there need be none."""

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault

Buffer = bytes | bytearray | memoryview


def tensor_to_bytes(tensor: Tensor) -> memoryview:
    """The bytes of an fp32 tensor: of its own memory if it is contiguous and on the CPU.

    The tensor must then stay unchanged until the bytes are sent.
    """
    assert tensor.dtype == torch.float32, tensor.dtype
    values = tensor.detach().to("cpu").contiguous().reshape(-1).numpy()
    return values.data.cast("B")


def tensor_from_bytes(buffer: Buffer, shape: Sequence[int]) -> Tensor:
    """The fp32 tensor of that shape; shares the memory of a writable buffer, copies another.

    Raises `PeerFault` if the buffer has another length.
    """
    view = memoryview(buffer).cast("B")
    count = int(numpy.prod(tuple(shape), dtype=numpy.int64))
    if len(view) != 4 * count:
        raise PeerFault(f"tensor of {len(view)} bytes where {4 * count} are due for {tuple(shape)}")
    values = numpy.frombuffer(view, dtype=numpy.float32)
    if view.readonly:
        values = values.copy()
    return torch.from_numpy(values).view(tuple(shape))
