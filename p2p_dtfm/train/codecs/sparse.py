"""The codec for reductions over slow links: random choice, then the largest, then few bits.

After CocktailSGD (Wang et al., ICML 2023). A part of all elements is selected by chance, which both
sides know alike. The largest of these travel, in a few bits each. The codec is of use only to a
sender that keeps what was not sent and adds it the next time (error feedback, `segment_reduction`).
"""

import math

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import SparseSpec
from p2p_dtfm.train.codecs.codec import FIRST, VERSION_BYTES, Codec, Turn
from p2p_dtfm.train.codecs.packing import Buffer, join, pack, packed_bytes, unpack
from p2p_dtfm.train.codecs.selection import selected_count, selected_indices, signed
from p2p_dtfm.train.kernels import choice
from p2p_dtfm.train.kernels import sparse as kernel
from p2p_dtfm.train.kernels.launcher import Launcher

BLOCK = 512
"""Kept elements that share a scale."""
_ROUNDS = 2
"""Rounds of Lloyd's iteration, starting from the mean: further rounds gain little."""
_MAGNITUDE = 0x7FFFFFFF


class Sparse(Codec):
    """u32 version · for each block fp32 least magnitude and fp32 step · unless all are kept, a bit
    for each selected element: is it kept · for each kept one its sign and level, in `bits` bits.

    All elements that are not sent decode to zero. With four bits or more the levels of a block
    reach from its least magnitude to its largest, so a kept element is off by at most half a step.
    With one or two bits the levels are those that are best on average. Of equal magnitudes the
    earlier elements are kept: nothing depends on a library's order.
    """

    name = "sparse"

    def __init__(self, spec: SparseSpec) -> None:
        self.one_in = spec.one_in
        self.keep_percent = spec.keep_percent
        self.bits = spec.bits

    def kept_count(self, count: int) -> int:
        """How many of `count` elements are sent."""
        return -(-selected_count(count, self.one_in) * self.keep_percent // 100)

    def payload_bytes(self, count: int) -> int:
        kept = self.kept_count(count)
        scales_bytes = 8 * -(-kept // BLOCK)
        return (
            VERSION_BYTES + scales_bytes + self._mark_bytes(count) + packed_bytes(kept, self.bits)
        )

    def _mark_bytes(self, count: int) -> int:
        selected = selected_count(count, self.one_in)
        return packed_bytes(selected, 1) if self.kept_count(count) < selected else 0

    def encode(self, values: Tensor, turn: Turn = FIRST) -> Buffer:
        assert values.dtype == torch.float32, values.dtype
        flat = values.detach().reshape(-1)
        version = self._version_tensor(flat.device)
        if not flat.numel():
            return join([version])
        launcher = choice.launcher_for(flat.device)
        count, mark_bytes = flat.numel(), self._mark_bytes(flat.numel())
        if launcher:
            selected = kernel.selected(launcher, flat.contiguous(), self._choice(count, turn))
            marks = _largest(selected, self.kept_count(count))
            packed_marks = kernel.packed_marks(launcher, marks)
            scales, packed = kernel.quantised(launcher, selected[marks], self.bits)
            return join([version, scales, packed_marks[:mark_bytes], packed])
        selected = flat[selected_indices(count, self.one_in, turn, flat.device)]
        marks = _largest(selected, self.kept_count(count))
        scales, numbers = self._quantised(selected[marks])
        packed_marks = pack(marks.to(torch.uint8), 1)[:mark_bytes]
        return join([version, scales, packed_marks, pack(numbers, self.bits)])

    def _choice(self, count: int, turn: Turn) -> kernel.Choice:
        step = turn.step % (self.one_in * 64)
        return kernel.Choice(count, self.one_in, signed(turn.place), step)

    def _quantised(self, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Least magnitude and step of each block [2 * blocks]; the elements' numbers, uint8."""
        magnitudes = _in_blocks(kept.abs())
        least, steps = self._scales(magnitudes, kept.numel())
        least = torch.where(least.isnan(), math.nan, least)  # one NaN of many
        steps = torch.where(torch.isfinite(steps), steps, math.nan)
        levels = torch.where(steps > 0, (magnitudes - least) / steps, 0.0).round_()
        numbers = levels.clamp_(0, self._levels).to(torch.uint8).view(-1)[: kept.numel()]
        signs = (kept < 0).to(torch.uint8) << (self.bits - 1)
        return torch.cat([least, steps], dim=1).view(-1), numbers | signs

    def _scales(self, magnitudes: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Least magnitude and step, [blocks, 1] each. Behind the first `count` magnitudes is
        filling."""
        if self.bits == 1:
            real = torch.arange(magnitudes.numel(), device=magnitudes.device) < count
            real = real.view_as(magnitudes)
            mean = _sums(torch.where(real, magnitudes, 0.0)) / real.sum(dim=1, keepdim=True)
            return mean, mean * 0.0
        if self.bits == 2:
            return _two_levels(magnitudes)
        least = magnitudes.amin(dim=1, keepdim=True)
        reach = magnitudes.amax(dim=1, keepdim=True) - least
        # some devices divide by a number by multiplying with its reciprocal
        return least, reach / torch.full_like(reach, self._levels)

    @property
    def _levels(self) -> int:
        """The highest level."""
        return (1 << (self.bits - 1)) - 1

    def _decoded(self, payload: Tensor, count: int, turn: Turn) -> Tensor:
        body = self._without_version(payload)
        if not count:
            return torch.zeros(0, device=body.device)
        kept, selected = self.kept_count(count), selected_count(count, self.one_in)
        scales_end = 8 * -(-kept // BLOCK)
        marks_end = scales_end + self._mark_bytes(count)
        marks = self._marks(body[scales_end:marks_end], selected, kept)
        launcher = choice.launcher_for(payload.device)
        if launcher:
            packed, chosen = body[marks_end:], self._choice(count, turn)
            strata = marks.nonzero().view(-1) if kept < selected else None
            return self._scattered(launcher, body[:scales_end], packed, strata, chosen)
        values = self._values(body[:scales_end], body[marks_end:], kept)
        indices = selected_indices(count, self.one_in, turn, body.device)
        decoded = torch.zeros(count, dtype=torch.float32, device=body.device)
        decoded[indices[marks]] = values
        return decoded

    def _scattered(
        self,
        launcher: Launcher,
        scales: Tensor,
        packed: Tensor,
        strata: Tensor | None,
        chosen: kernel.Choice,
    ) -> Tensor:
        values, is_negative = kernel.decoded(launcher, scales, packed, strata, self.bits, chosen)
        if is_negative:
            raise self._fault("a negative magnitude or step")
        return values

    def _marks(self, packed: Tensor, selected: int, kept: int) -> Tensor:
        if kept == selected:
            return torch.ones(selected, dtype=torch.bool, device=packed.device)
        bits = unpack(packed, 1, 8 * packed.numel())
        found = int(bits[:selected].sum(dtype=torch.int64))
        if found != kept or bool(bits[selected:].any()):
            raise self._fault(f"{found} elements where {kept} are due")
        return bits[:selected].to(torch.bool)

    def _values(self, packed_scales: Tensor, packed_numbers: Tensor, kept: int) -> Tensor:
        scales = packed_scales.view(torch.float32).view(-1, 2)
        if bool((scales < 0).any()):
            raise self._fault("a negative magnitude or step")
        numbers = unpack(packed_numbers, self.bits, kept)
        levels = _in_blocks((numbers & self._levels).to(torch.float32))
        magnitudes = (levels * scales[:, 1:]).add_(scales[:, :1]).view(-1)[:kept]
        return torch.where(numbers >> (self.bits - 1) > 0, -magnitudes, magnitudes)


def _largest(values: Tensor, kept: int) -> Tensor:
    """Marks the `kept` largest magnitudes.

    Magnitudes are compared as integers: their bits have the same order, and no integer is NaN.
    """
    if kept == values.numel():
        return torch.ones_like(values, dtype=torch.bool)
    magnitudes = values.view(torch.int32) & _MAGNITUDE
    least = torch.kthvalue(magnitudes, values.numel() - kept + 1).values
    larger = magnitudes > least
    equal = magnitudes == least
    places_left = kept - larger.sum()
    return larger | (equal & (equal.cumsum(0) <= places_left))


def _two_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """The lower level of each row, and the step to the higher one (Lloyd 1982). Each level is the
    mean of the magnitudes that are nearer to it."""
    border = _sums(magnitudes) / BLOCK
    lower = higher = border
    for _ in range(_ROUNDS):
        is_low = magnitudes <= border
        count = is_low.sum(dim=1, keepdim=True)
        lower = _sums(torch.where(is_low, magnitudes, 0.0)) / count.clamp(min=1)
        high = _sums(torch.where(is_low, 0.0, magnitudes)) / (BLOCK - count).clamp(min=1)
        higher = torch.maximum(lower, high)
        border = (lower + higher) / 2
    return lower, higher - lower


def _sums(magnitudes: Tensor) -> Tensor:
    """The sum of each row of [blocks, BLOCK], added by halving: in one order on any device."""
    total = magnitudes
    while total.shape[1] > 1:
        half = total.shape[1] // 2
        total = total[:, :half] + total[:, half:]
    return total


def _in_blocks(kept: Tensor) -> Tensor:
    """[blocks, BLOCK], the last filled with repetitions of its last value: no new extremes."""
    missing = -kept.numel() % BLOCK
    return torch.cat([kept, kept[-1:].expand(missing)]).view(-1, BLOCK)
