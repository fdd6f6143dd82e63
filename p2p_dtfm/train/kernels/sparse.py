"""Few elements in few bits; its twin is `codecs.sparse`. The largest are found by PyTorch."""

from typing import NamedTuple

import torch
from torch import Tensor

from p2p_dtfm.train.kernels.launcher import Launcher, blocks_for, over_elements

_BLOCK = 512


class Choice(NamedTuple):
    """Which elements may travel: see `codecs.selection`."""

    elements: int
    one_in: int
    place: int
    """As a signed number."""
    turn: int
    """Not negative."""

    @property
    def selected(self) -> int:
        """How many elements may travel."""
        return -(-self.elements // self.one_in)


def selected(launcher: Launcher, values: Tensor, choice: Choice) -> Tensor:
    """The elements of flat fp32 `values` that may travel."""
    found = torch.empty(choice.selected, device=values.device)
    over_elements(launcher, "sparse_select", choice.selected, values, *choice, found)
    return found


def packed_marks(launcher: Launcher, marks: Tensor) -> Tensor:
    """One bit for each mark of bool [count]."""
    count = marks.numel()
    packed = torch.empty(-(-count // 8), dtype=torch.uint8, device=marks.device)
    over_elements(launcher, "sparse_pack_marks", packed.numel(), marks, count, packed)
    return packed


def quantised(launcher: Launcher, kept: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Least magnitude and step of each block, fp32 [2 * blocks]; the packed numbers, uint8."""
    count, device = kept.numel(), kept.device
    scales = torch.empty(2 * -(-count // _BLOCK), device=device)
    packed = torch.empty(-(-count * bits // 8), dtype=torch.uint8, device=device)
    blocks, threads = blocks_for(count, _BLOCK), _BLOCK // 2
    launcher.launch("sparse_quantise", blocks, threads, kept, count, bits, scales, packed)
    return scales, packed


def decoded(
    launcher: Launcher,
    scales: Tensor,
    packed: Tensor,
    strata: Tensor | None,
    bits: int,
    choice: Choice,
) -> tuple[Tensor, bool]:
    """All values, and whether a magnitude or a step is negative.

    `strata`: int64 numbers of the kept elements, in rising order; None: all elements are kept.
    """
    values = torch.zeros(choice.elements, device=packed.device)
    fault = torch.zeros(1, dtype=torch.int32, device=packed.device)
    kept = choice.selected if strata is None else strata.numel()
    given = (scales, packed, strata, kept, bits, *choice, values, fault)
    over_elements(launcher, "sparse_decode", kept, *given)
    return values, bool(fault.item())
