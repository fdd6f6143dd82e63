"""Codecs of few levels for boundaries over slow links: rotate, then round.

A random rotation makes the values of a tile look like draws from a normal distribution, whatever
they were. (It is Hadamard's, behind random signs: Suresh et al. 2017, "Distributed mean estimation
with limited communication".) So one scale tells all about a tile. The levels that are best for a
normal distribution (Max 1960, Lloyd 1982) are the best for the tile. Signs and dither are drawn
alike at both ends and cost no bytes.

Activations take the nearest of these levels. Their gradients take evenly spaced levels with a
subtractive dither (Roberts 1962): what is added before rounding is taken away after it. So a
gradient is right on average, as with stochastic rounding, but at half the variance.
"""

import math
from functools import cache

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.train.codecs.codec import FIRST, VERSION_BYTES, Codec, Turn
from p2p_dtfm.train.codecs.digits import Digits
from p2p_dtfm.train.codecs.normal_levels import NORMAL_LEVELS, UNIT
from p2p_dtfm.train.codecs.packing import Buffer, join
from p2p_dtfm.train.codecs.selection import random_bits, signed

TILE = 128
"""Values that are rotated together and share a scale. Tiles are cut from the flat tensor, so any
width is allowed."""
_ROOT = math.sqrt(TILE)
"""The factor by which Hadamard's matrix lengthens a vector."""
_HEAD_BYTES = VERSION_BYTES + 4
_SCALE_SHIFT = 20
"""Bits that an fp32 mean square loses: its exponent and three bits of its fraction stay."""
_SCALES = 256
_FIRST_SCALE = (127 << 3) - _SCALES
"""The first scale, such that the last one is just below one. After division by the power of two all
values are below one as well."""
_NOT_FINITE = 1 << 30
"""Stands in the exponent's place for a tensor that decodes to NaN. Like fp32, the codec hides no
divergence."""
_EXPONENTS = range(-148, 129)
_SAFE_EXPONENT = 120
_LARGEST = torch.finfo(torch.float32).max
_FINE = 1 << 15
"""Values are rounded to so many parts of their root mean square before rotation: then sums of a
tile stay below 2^24."""
_DITHERS = 1 << 10
_CELLS_EACH = 512
"""Cells for each root mean square in the table of nearest levels."""
_CELLS = 4 * _CELLS_EACH


class Rotated(Codec):
    """u32 version · i32 exponent of the largest value · u8 scale of each tile of `TILE` · a number
    below `levels` for each value, and for what the last tile lacks.

    A scale is the tile's mean square, in steps of an eighth of an octave or less. With a scale of 0
    the whole tile decodes to zero: it is below 2^-16 of the largest value.

    Rotated are whole numbers, whose sums are exact in fp32 in any order. So a product with a matrix
    may do it, with the same bits on any device.
    """

    def __init__(self, name: str, levels: int, step_thousandths: int) -> None:
        self.name = name
        self.levels = levels
        self._step = step_thousandths / 1000
        """Distance between the levels of gradients, in root mean squares of a tile."""
        self._digits = Digits(levels)
        above = NORMAL_LEVELS[levels]
        self._values = [*(-level for level in reversed(above)), *above]
        assert len(self._values) == levels, name
        self._nearest_on: dict[torch.device, Tensor] = {}

    def payload_bytes(self, count: int) -> int:
        tiles = -(-count // TILE)
        return _HEAD_BYTES + tiles + self._digits.packed_bytes(tiles * TILE)

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        assert values.dtype == torch.float32, values.dtype
        flat = values.detach().reshape(-1)
        exponent = largest_exponent(flat)
        told = _NOT_FINITE if exponent is None else exponent
        head = torch.tensor([self.version, told], dtype=torch.int32, device=flat.device)
        if exponent is None:
            rest = self.payload_bytes(flat.numel()) - _HEAD_BYTES
            return join([head, torch.zeros(rest, dtype=torch.uint8, device=flat.device)])
        tiles = times_power_of_two(_in_tiles(flat), -exponent)
        scales, key = _scales(tiles), _key(turn)
        # a tile of scale 0 decodes to zero, whatever its numbers are
        parts = tiles / _scale_values(1 / _FINE, flat.device)[scales.clamp(min=1)][:, None]
        rotated = (parts.round_() * _signs(key, flat.device)) @ _hadamard(flat.device)
        if turn.unbiased:
            shift = _dither(key, rotated) * (0.5 / _DITHERS) + self.levels / 2
            numbers = (rotated * (1 / (self._step * _ROOT * _FINE)) + shift).floor_()
            numbers = numbers.clamp_(0, self.levels - 1).to(torch.int64)
        else:
            places = (rotated * (_CELLS_EACH / (_ROOT * _FINE))).clamp_(-_CELLS, _CELLS - 1)
            numbers = self._nearest(flat.device)[(places + _CELLS).to(torch.int64)]
        return join([head, scales.to(torch.uint8), self._digits.pack(numbers.view(-1))])

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        body, device = self._without_version(payload), payload.device
        (exponent,) = body[:4].view(torch.int32).tolist()
        if exponent == _NOT_FINITE:
            return torch.full((count,), math.nan, device=device)
        if exponent not in _EXPONENTS:
            raise self._fault(f"an exponent of {exponent}")
        tiles, key = -(-count // TILE), _key(turn)
        scales = body[4 : 4 + tiles].to(torch.int64)
        numbers = self._digits.unpack(body[4 + tiles :], tiles * TILE)
        if numbers is None:
            raise self._fault(f"a number that is none of {self.levels}")
        numbers = numbers.view(-1, TILE)
        if turn.unbiased:
            whole = (2 * numbers + (1 - self.levels)).to(torch.float32) * _DITHERS
            whole, unit = whole - _dither(key, whole), self._step / (2 * _DITHERS)
        else:
            whole, unit = torch.tensor(self._values, device=device)[numbers], 1 / UNIT
            whole = whole.to(torch.float32)
        turned_back = (whole @ _hadamard(device)) * _signs(key, device)
        decoded = turned_back * _scale_values(unit / _ROOT, device)[scales][:, None]
        found = times_power_of_two(decoded.view(-1)[:count], exponent)
        if exponent > _SAFE_EXPONENT:  # what was finite must not come out as what is not
            found = found.clamp(-_LARGEST, _LARGEST)
        return found

    def _nearest(self, device: torch.device) -> Tensor:
        """The number of the nearest level for the middle of each cell. A table, since a search
        would take longer than all the rest."""
        if device not in self._nearest_on:
            cells = torch.arange(-_CELLS, _CELLS, dtype=torch.int64) * 2 + 1
            levels = torch.tensor(self._values)
            borders = (levels[1:] + levels[:-1]) * _CELLS_EACH
            self._nearest_on[device] = torch.bucketize(cells * UNIT, borders).to(device)
        return self._nearest_on[device]


def largest_exponent(values: Tensor) -> int | None:
    """The power of two just above the largest magnitude; 0 if all values are zero. None if a value
    is not finite."""
    largest = float(values.abs().amax()) if values.numel() else 0.0
    return math.frexp(largest)[1] if math.isfinite(largest) else None


def times_power_of_two(values: Tensor, exponent: int) -> Tensor:
    """The values times 2^`exponent`, in two factors, each of which fp32 holds."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _in_tiles(flat: Tensor) -> Tensor:
    """[tiles, TILE], the last filled with zeros."""
    return torch.nn.functional.pad(flat, (0, -flat.numel() % TILE)).view(-1, TILE)


def _scales(tiles: Tensor) -> Tensor:
    """The scale of each tile, int64 [tiles]. Squares are added by halving: in one order
    anywhere."""
    total = tiles * tiles * (1.0 / TILE)
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    found = (total.view(-1).view(torch.int32) >> _SCALE_SHIFT).to(torch.int64)
    return (found - _FIRST_SCALE).clamp_(0, _SCALES - 1)


@cache
def _scale_values(unit: float, device: torch.device) -> Tensor:
    """For each scale the root of its mean square, times `unit`; zero for scale 0."""
    steps = torch.arange(_SCALES, dtype=torch.int32) + _FIRST_SCALE
    middles = (steps << _SCALE_SHIFT) + (1 << (_SCALE_SHIFT - 1))
    roots = [math.sqrt(square) * unit for square in middles.view(torch.float32).tolist()]
    return torch.tensor([0.0, *roots[1:]], dtype=torch.float32, device=device)


@cache
def _hadamard(device: torch.device) -> Tensor:
    """Hadamard's matrix of ones and minus ones, [TILE, TILE]. It is its own transpose, and `TILE`
    times its own inverse."""
    matrix = torch.ones(1, 1, device=device)
    while matrix.shape[0] < TILE:
        top = torch.cat([matrix, matrix], dim=1)
        matrix = torch.cat([top, torch.cat([matrix, -matrix], dim=1)])
    return matrix


def _key(turn: Turn) -> int:
    """The number from which all chance of a tensor comes."""
    return Prng(Prng(turn.place).next_u64() + turn.step).next_u64()


def _signs(key: int, device: torch.device) -> Tensor:
    """1 or -1, [TILE]: the same for all tiles of a tensor."""
    prng = Prng(~key)
    drawn = prng.next_u64() << 64 | prng.next_u64()
    return torch.tensor([1.0 - 2.0 * (drawn >> n & 1) for n in range(TILE)], device=device)


def _dither(key: int, like: Tensor) -> Tensor:
    """Odd numbers between `_DITHERS` and its negative; each random draw gives two."""
    places = torch.arange(like.numel() // 2, dtype=torch.int64, device=like.device)
    drawn = random_bits(places + signed(key)).to(torch.int32).view(torch.int16)
    return ((drawn & (_DITHERS - 1)).to(torch.float32) * 2.0 + (1.0 - _DITHERS)).view_as(like)
