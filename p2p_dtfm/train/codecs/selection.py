"""Which elements may travel in a step. All peers choose the same, and no byte is sent for it.

The elements are cut into strata of `one_in` neighbours. Each stratum gives one element in each
step, and each of its elements has its turn once in `one_in` steps. Chance decides which comes
first. So the choice is as spread as a random one, and no element waits longer than `one_in` steps.
"""

import torch
from torch import Tensor

from p2p_dtfm.train.codecs.codec import Turn

_GOLDEN = -0x61C8864680B583EB
"""0x9E3779B97F4A7C15 as a signed number."""
_FIRST_FACTOR = -0x40A7B892E31B1A47
"""0xBF58476D1CE4E5B9."""
_SECOND_FACTOR = -0x6B2FB644ECCEEE15
"""0x94D049BB133111EB."""
_LEFT_31_BITS = (1 << 31) - 1


def selected_count(count: int, one_in: int) -> int:
    """How many of `count` elements are selected."""
    return -(-count // one_in)


def selected_indices(
    count: int, one_in: int, turn: Turn, device: torch.device | str = "cpu"
) -> Tensor:
    """int64 indices in rising order. A shorter last stratum has its turns more often."""
    strata = torch.arange(selected_count(count, one_in), dtype=torch.int64, device=device)
    if one_in == 1:
        return strata
    starts = strata * one_in
    first = random_bits(strata + signed(turn.place))
    widths = torch.full_like(strata, one_in)
    widths[-1:] = count - one_in * (strata.numel() - 1)
    return starts + (first + turn.step % (one_in * 64)) % widths


def random_bits(values: Tensor) -> Tensor:
    """31 bits from each int64: SplitMix64's output function (Steele, Lea, Flood 2014)."""
    mixed = values * _GOLDEN
    mixed = (mixed ^ _shifted(mixed, 30)) * _FIRST_FACTOR
    mixed = (mixed ^ _shifted(mixed, 27)) * _SECOND_FACTOR
    return _shifted(mixed, 31) & _LEFT_31_BITS


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Shifts right by `bits`, with zeros from the left: int64's own shift does not do that."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def signed(place: int) -> int:
    """The same 64 bits as a signed number."""
    assert 0 <= place < 1 << 64, place
    return place - (1 << 64) if place >> 63 else place
