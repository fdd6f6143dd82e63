"""The codec for boundaries whose tensors are of low rank: a basis and each token's place in it.

What tokens say lies close to few directions of the width, which differ in each microbatch (Vogels
et al. 2019, "PowerSGD", for gradients of parameters). So as many directions travel as there is room
for, and what is outside of them is lost. On tensors that fill all directions alike `rotated4` loses
less in as many bytes.
"""

import math

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import CODEC_BYTES_PER_KIBI, KIBI
from p2p_dtfm.train.codecs.codec import FIRST, VERSION_BYTES, Codec, Turn
from p2p_dtfm.train.codecs.digits import Digits
from p2p_dtfm.train.codecs.packing import Buffer, join
from p2p_dtfm.train.codecs.rotated import largest_exponent, times_power_of_two
from p2p_dtfm.train.codecs.selection import random_bits

_SCALE_BYTES = 2
_TOP = 63
"""The largest number; the least is its negative. So there are 127 of them, in seven bits."""
_DIGITS = Digits(2 * _TOP + 1)
_TOGETHER = 128
"""Numbers are packed in multiples of this count."""
_NOT_A_NUMBER = 0x7FC0
_INFINITE = 0x7F80
"""Infinity in bf16; `_NOT_A_NUMBER` as in `sign`."""


LEAST_SHARE = 8
"""There must be room for one in so many of the directions that a boundary's tensors can have."""


class Subspace(Codec):
    """u32 version · bf16 scale of each row, its last dimension being one · `rank` numbers for each
    row · those of the basis, a row for each of its directions · zeros.

    The length depends on the number of elements alone; the rank is the largest that has room. A row
    is its numbers times the basis, in whole numbers whose sums are exact in any order, times its
    scale. Which basis is found depends on the sender's arithmetic, as the tensor itself does. A
    tensor with a value that is not finite decodes to NaN.
    """

    name = "subspace"

    def payload_bytes(self, count: int) -> int:
        return VERSION_BYTES + -(-count * CODEC_BYTES_PER_KIBI[self.name] // KIBI)

    def rank(self, rows: int, width: int) -> int:
        """How many directions are sent for so many rows. With 0 the tensor becomes zero: one that
        is narrow or very small has no room."""
        room = self._room_bytes(rows, width)
        numbers = max(0, room) // _DIGITS.packed_bytes(_TOGETHER) * _TOGETHER
        return min(rows, width, numbers // max(1, rows + width))

    def _room_bytes(self, rows: int, width: int) -> int:
        """Bytes that are left after the scales; below zero if not even the scales have room."""
        return self.payload_bytes(rows * width) - VERSION_BYTES - _SCALE_BYTES * rows

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        assert values.dtype == torch.float32, values.dtype
        matrix = _as_matrix(values.detach(), tuple(values.shape))
        rows, width = matrix.shape
        rank, count = self.rank(rows, width), values.numel()
        exponent = largest_exponent(matrix)
        scales = torch.zeros(rows, dtype=torch.bfloat16, device=matrix.device)
        whole = torch.zeros(rank * (rows + width), device=matrix.device)
        if exponent is None:
            scales.fill_(math.nan)
        elif rank:
            parts = times_power_of_two(matrix, -exponent)
            basis = _basis(parts, rank)
            places = _places(parts, basis)
            # rounded up, so that no number is above the largest
            steps = places.abs().amax(dim=1) * (1.01 / _TOP)
            scales = times_power_of_two(steps, exponent).to(torch.bfloat16)
            rounded = times_power_of_two(scales.to(torch.float32), -exponent)[:, None]
            numbers = torch.where(rounded > 0, places / rounded, 0.0)
            numbers = numbers.round_().clamp_(-_TOP, _TOP)
            whole = torch.cat([numbers.reshape(-1), basis.reshape(-1)])
        bits = scales.view(torch.int16)
        scales = torch.where(scales.isnan(), _NOT_A_NUMBER, bits).to(torch.int16)
        scales = scales if self._room_bytes(rows, width) >= 0 else scales[:0]
        filled = torch.nn.functional.pad(whole, (0, -whole.numel() % _TOGETHER))
        packed = _DIGITS.pack(filled.to(torch.int64) + _TOP)
        head = [self._version_tensor(matrix.device), scales, packed]
        missing = self.payload_bytes(count) - sum(part.nbytes for part in head)
        return join([*head, packed.new_zeros(missing)])

    def _decoded_as(self, payload: Tensor, shape: tuple[int, ...], turn: Turn) -> Tensor:
        body = self._without_version(payload)
        rows, width = _matrix_shape(shape)
        if self._room_bytes(rows, width) < 0:
            return torch.zeros(shape, device=body.device)
        rank, end = self.rank(rows, width), _SCALE_BYTES * rows
        bits = body[:end].view(torch.int16)
        if bool(((bits < 0) | ((bits >= _INFINITE) & (bits != _NOT_A_NUMBER))).any()):
            raise self._fault("a scale that is none")
        count = rank * (rows + width)
        together = -(-count // _TOGETHER) * _TOGETHER
        packed_end = end + _DIGITS.packed_bytes(together)
        numbers = _DIGITS.unpack(body[end:packed_end], together)
        if numbers is None:
            raise self._fault(f"a number that is none of {2 * _TOP + 1}")
        whole = (numbers[:count] - _TOP).to(torch.float32)
        places, basis = (
            whole[: rank * rows].view(rows, rank),
            whole[rank * rows :].view(rank, width),
        )
        scales = bits.view(torch.bfloat16).to(torch.float32)
        largest = torch.finfo(torch.float32).max
        return ((places @ basis) * scales[:, None]).clamp(-largest, largest).view(shape)


def require_directions(spec: RunSpec) -> None:
    """Raises `UserError` if a run allows `subspace` and hardly a direction has room beside its own
    basis. This is so where microbatches are small or the model is narrow."""
    codec = Subspace()
    if codec.name not in (*spec.codecs.activations, *spec.codecs.gradients):
        return
    for layer in range(1, len(spec.layers) or spec.model.layer_count):
        rows, width = _matrix_shape(spec.boundary_shape(layer))
        rank = codec.rank(rows, width)
        if LEAST_SHARE * rank < min(rows, width):
            raise UserError(
                f"codecs: subspace has room for {counted(rank, 'direction')} of {width} in "
                f"microbatches of {counted(rows, 'row')}: what is outside of them is lost",
                "use rotated4, which takes as many bytes; or larger microbatches",
            )


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    width = shape[-1] if shape else 1
    return math.prod(shape) // max(1, width), width


def _as_matrix(values: Tensor, shape: tuple[int, ...]) -> Tensor:
    return values.reshape(_matrix_shape(shape))


def _places(parts: Tensor, basis: Tensor) -> Tensor:
    """For each row of `parts` the coefficients, [rows, rank], by which the basis comes nearest."""
    gram, along = basis @ basis.T, basis @ parts.T
    places, failed = torch.linalg.solve_ex(gram, along)
    if bool(failed):  # a direction over which a wide row spreads evenly may round to nothing
        least = gram.diagonal().amax() / (1 << 10)
        places = torch.linalg.solve(gram + least * torch.eye(len(gram), device=gram.device), along)
    found: Tensor = places.T
    return found


def _basis(parts: Tensor, rank: int) -> Tensor:
    """The basis: whole numbers [rank, width]. Its rows are nearly orthogonal, and span nearly the
    directions that hold most of `parts`. It is found by two rounds of subspace iteration, from
    signs that never change."""
    width = parts.shape[1]
    places = torch.arange(width * rank, dtype=torch.int64, device=parts.device)
    found = (random_bits(places) >> 30).to(torch.float32).view(width, rank) * 2.0 - 1.0
    for _ in range(2):
        found = torch.linalg.qr(parts.T @ (parts @ found)).Q
    return (found.T * (_TOP / found.abs().amax())).round_().contiguous()
