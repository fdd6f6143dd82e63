"""Small unsigned numbers and yes-or-no marks as bytes, and tensors as bytes; on any device."""

from collections.abc import Sequence

import torch
from torch import Tensor

Buffer = bytes | bytearray | memoryview


def packed_bytes(count: int, bits: int) -> int:
    """Bytes that `count` numbers of `bits` bits take."""
    return -(-count * bits // 8)


def pack(numbers: Tensor, bits: int) -> Tensor:
    """uint8 numbers below 2^bits, 8/bits to a byte, the first in the lowest bits.

    `bits` is 1, 2, 4 or 8; unused bits of the last byte are zero.
    """
    each = _numbers_in_byte(bits)
    if each == 1:
        return numbers
    padded = torch.nn.functional.pad(numbers, (0, -numbers.numel() % each)).view(-1, each)
    packed = padded[:, 0].clone()
    for place in range(1, each):
        packed |= padded[:, place] << (place * bits)
    return packed


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The numbers that `pack` was given; unused bits of the last byte are ignored."""
    each = _numbers_in_byte(bits)
    if each == 1:
        return packed
    numbers = packed.new_empty((packed.numel(), each))
    for place in range(each):
        torch.bitwise_and(packed >> (place * bits), (1 << bits) - 1, out=numbers[:, place])
    return numbers.view(-1)[:count]


def _numbers_in_byte(bits: int) -> int:
    assert bits in (1, 2, 4, 8), bits
    return 8 // bits


def join(parts: Sequence[Tensor]) -> memoryview:
    """The bytes of flat tensors, one after the other; copied to the CPU at once."""
    whole = torch.cat([part.contiguous().view(torch.uint8) for part in parts])
    return whole.cpu().numpy().data


def as_tensor(payload: Buffer, device: torch.device | str) -> Tensor:
    """The payload as flat uint8. It shares a writable buffer's memory if the device allows it."""
    view = memoryview(payload).cast("B")
    if not len(view):
        return torch.empty(0, dtype=torch.uint8, device=device)
    writable = bytearray(view) if view.readonly else view
    return torch.frombuffer(writable, dtype=torch.uint8).to(device)
