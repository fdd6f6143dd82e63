"""The arithmetic of gradient reduction; how the bytes travel is the caller's business.

Each holder of a segment sums one shard of its gradient: the parts of all holders, in pipeline
order, in fp32. The shard sums are then exchanged. Every element is summed at exactly one place and
in one order, so all holders end with the same bytes.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.train.model.layer_state import LayerState

Buffer = bytes | bytearray | memoryview


def shard_bounds(length: int, holder_count: int) -> list[tuple[int, int]]:
    """Cut `length` elements into one range for each holder, as equal as whole numbers allow.

    The ranges cover all elements in order; a range may be empty.
    """
    assert length >= 0 and holder_count >= 1, (length, holder_count)
    cuts = [length * holder // holder_count for holder in range(holder_count + 1)]
    return list(pairwise(cuts))


@torch.no_grad()
def sum_parts(parts: Sequence[Tensor]) -> Tensor:
    """The fp32 sum of the holders' flat parts, always first + second + third and so on.

    `parts` must be in pipeline order. The result is a new tensor.
    """
    assert parts and all(part.shape == parts[0].shape for part in parts)
    assert all(part.dtype == torch.float32 for part in parts)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part.to(total.device)
    return total


def gradient_count(states: Sequence[LayerState]) -> int:
    """Elements in the flat gradient of a segment."""
    return sum(state.parameter_count for state in states)


def flatten_gradients(states: Sequence[LayerState]) -> Tensor:
    """The gradients of a segment's layers, one after the other, as one flat fp32 copy on the CPU.

    `states` must be in layer order.
    """
    _require_layer_order(states)
    return torch.cat([state.gradient_vector().detach().to("cpu") for state in states])


def unflatten_gradients(flat: Tensor, states: Sequence[LayerState]) -> dict[int, Tensor]:
    """Views of a segment's flat gradient, by layer: what `LayerState.apply` takes."""
    _require_layer_order(states)
    assert flat.shape == (gradient_count(states),), flat.shape
    parts = flat.split([state.parameter_count for state in states])
    return {state.layer: part for state, part in zip(states, parts, strict=True)}


def _require_layer_order(states: Sequence[LayerState]) -> None:
    layers = [state.layer for state in states]
    assert layers and layers == list(range(layers[0], layers[0] + len(layers))), layers


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
