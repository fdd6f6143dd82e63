"""Copies and sums that look at what they write, block by block."""

import math

import pytest
import torch

from p2p_dtfm.train.stage.finite import BLOCK_ELEMENTS, add_if_finite, copy_if_finite

COUNT = 2 * BLOCK_ELEMENTS + 3


def test_a_copy_has_the_same_bits_and_finds_what_is_not_finite_in_any_block() -> None:
    values, target = torch.randn(COUNT), torch.zeros(COUNT)
    assert copy_if_finite(values, target)
    assert torch.equal(values, target)
    for place in (0, BLOCK_ELEMENTS, COUNT - 1):
        poisoned = values.clone()
        poisoned[place] = math.nan
        assert not copy_if_finite(poisoned, target)


@pytest.mark.parametrize("holders", [1, 2, 3, 5])
@pytest.mark.parametrize("mine", [0, 1, -1])
def test_a_sum_is_added_in_order_and_leaves_the_others_as_they_are(holders: int, mine: int) -> None:
    mine %= holders
    generator = torch.Generator().manual_seed(holders)
    parts = [torch.randn(COUNT, generator=generator) * 10**n for n in range(holders)]
    before = [part.clone() for part in parts]
    expected = before[0].clone()
    for part in before[1:]:
        expected += part
    assert add_if_finite(parts, parts[mine])
    assert torch.equal(parts[mine], expected)
    for number in set(range(holders)) - {mine}:
        assert torch.equal(parts[number], before[number])


def test_infinities_that_cancel_and_sums_that_overflow_are_found() -> None:
    zeros = [torch.zeros(COUNT) for _ in range(3)]
    zeros[1][-1], zeros[2][-1] = math.inf, -math.inf
    assert not add_if_finite(zeros, zeros[0])
    large = [torch.full((3,), 3e38) for _ in range(2)]
    assert not add_if_finite(large, large[1])
    large[0] *= -1
    large[1].fill_(3e38)
    assert add_if_finite(large, large[1])
