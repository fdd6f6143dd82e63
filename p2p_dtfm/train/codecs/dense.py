"""Codecs that send every element: as it is, or in fewer bits."""

import math

import torch
from torch import Tensor

from p2p_dtfm.train.codecs.codec import FIRST, VERSION_BYTES, Codec, Turn
from p2p_dtfm.train.codecs.packing import Buffer, join
from p2p_dtfm.train.kernels import choice, int8

INT8_BLOCK = 128
"""Elements that share a scale: 3% more bytes, and one large value spoils only its block."""
_INT8_LEVELS = 127
_HALF_TOP_EXPONENT = 15
"""The largest element is scaled to at most 2^15, just within fp16's range."""
_HALF_EXPONENTS = range(-163, 114)
"""Powers of two to divide by: from that of fp32's least number to that of its largest."""


class Fp32(Codec):
    """The values themselves."""

    name = "fp32"
    lossless = True

    def payload_bytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        flat = _flat(values).cpu()
        return flat.numpy().data.cast("B")

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        return payload.view(torch.float32)


class Bf16(Codec):
    """The upper half of each fp32, rounded to nearest even."""

    name = "bf16"

    def payload_bytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        return join([_flat(values).to(torch.bfloat16)])

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        return payload.view(torch.bfloat16).to(torch.float32)


class Fp16(Codec):
    """IEEE half precision, with one power of two for the whole tensor.

    Gradients of a mean over many tokens are far below fp16's least number; scaled so that the
    largest element comes close to fp16's largest, elements down to 2^-39 of it stay.

    u32 version · i32 exponent · fp16 for each element
    """

    name = "fp16"

    def payload_bytes(self, count: int) -> int:
        return VERSION_BYTES + 4 + 2 * count

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        flat = _flat(values)
        exponent = _half_exponent(flat)
        halves = _times_power_of_two(flat, -exponent).to(torch.float16)
        head = torch.tensor([self.version, exponent], dtype=torch.int32, device=flat.device)
        return join([head, halves])

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        body = self._without_version(payload)
        (exponent,) = body[:4].view(torch.int32).tolist()
        if exponent not in _HALF_EXPONENTS:
            raise self._fault(f"an exponent of {exponent}")
        halves = body[4:].view(torch.float16).to(torch.float32)
        return _times_power_of_two(halves, exponent)


class Int8(Codec):
    """One byte for each element, a scale for each block of `INT8_BLOCK`.

    A block's largest magnitude is 127 of its steps, so an element is off by at most half a step
    (Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", with linear levels). A
    block with a value that is not finite decodes to NaN: like fp32, the codec hides no divergence.

    u32 version · fp32 step for each block · i8 for each element
    """

    name = "int8"

    def payload_bytes(self, count: int) -> int:
        return VERSION_BYTES + 4 * -(-count // INT8_BLOCK) + count

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        flat = _flat(values)
        launcher = choice.launcher_for(flat.device)
        if launcher:
            return join([int8.encode(launcher, flat, self.version)])
        blocks = _in_blocks(flat)
        largest = blocks.abs().amax(dim=1)
        # some devices divide by a number by multiplying with its reciprocal; not by a tensor
        steps = largest / torch.full_like(largest, _INT8_LEVELS)
        steps = torch.where(torch.isfinite(steps), steps, math.nan)
        levels = torch.where(steps[:, None] > 0, blocks / steps[:, None], 0.0).round_()
        levels = levels.clamp_(-_INT8_LEVELS, _INT8_LEVELS).to(torch.int8)
        numbers = levels.view(-1)[: flat.numel()]
        return join([self._version_tensor(flat.device), steps, numbers])

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        body = self._without_version(payload)
        launcher = choice.launcher_for(payload.device)
        if launcher:
            values, is_negative = int8.decode(launcher, body, count)
            if is_negative:
                raise self._fault("a negative step")
            return values
        steps_end = 4 * -(-count // INT8_BLOCK)
        steps = body[:steps_end].view(torch.float32)
        if bool((steps < 0).any()):
            raise self._fault("a negative step")
        blocks = _in_blocks(body[steps_end:].view(torch.int8).to(torch.float32))
        return (blocks * steps[:, None]).view(-1)[:count]


def _flat(values: Tensor) -> Tensor:
    assert values.dtype == torch.float32, values.dtype
    return values.detach().contiguous().view(-1)


def _in_blocks(flat: Tensor) -> Tensor:
    """[blocks, INT8_BLOCK], the last filled with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)


def _half_exponent(flat: Tensor) -> int:
    """The power of two that the elements are divided by; 0 if all are zero or one is not finite."""
    if not flat.numel():
        return 0
    largest = float(flat.abs().amax())
    if largest == 0.0 or not math.isfinite(largest):
        return 0
    return math.frexp(largest)[1] - _HALF_TOP_EXPONENT


def _times_power_of_two(values: Tensor, exponent: int) -> Tensor:
    """Exact unless the result leaves fp32's range; in two factors, each of which fp32 holds."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)
