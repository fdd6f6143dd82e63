"""Copies and sums that look at what they write, block by block."""

import math

import pytest
import torch

from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage.finite import (
    BLOCK_ELEMENTS,
    CODEC_TIMES,
    FIRST_LIMIT,
    MOST_TIMES,
    add_if_finite,
    boundary_limit,
    copy_if_finite,
    is_within,
)
from p2p_dtfm.train.stage.segment_reduction import PoisonedPart, SegmentCut, SegmentReduction
from tests.core.builders import run_spec

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


def test_what_is_within_bounds_is_a_number_and_no_larger() -> None:
    assert is_within(torch.zeros(0), 1.0) and is_within(torch.tensor([-2.0, 2.0]), 2.0)
    for wrong in (math.nan, math.inf, -math.inf, 2.1, -2.1):
        assert not is_within(torch.tensor([1.0, wrong, 0.0]), 2.0)


@pytest.mark.parametrize("blocks", [2, 24])
def test_bounds_leave_room_at_each_boundary_for_what_codecs_and_two_layers_add(blocks: int) -> None:
    """Otherwise a peer that is given the largest allowed value would be the one that has to stand
    still."""
    model = {"layers": blocks, "width": 32, "heads": 2, "context": 16, "vocabulary": 64}
    spec, layers = run_spec(model=model), blocks + 2
    for back in (False, True):
        way = [boundary_limit(spec, layer, back=back) for layer in range(1, layers)]
        way = way[::-1] if back else way
        assert FIRST_LIMIT <= way[0] < way[-1] <= FIRST_LIMIT * MOST_TIMES
        assert all(
            after > CODEC_TIMES * before for before, after in zip(way, way[2:], strict=False)
        )
    square = torch.tensor(CODEC_TIMES * FIRST_LIMIT * MOST_TIMES) ** 2
    assert bool(torch.isfinite(square * (1 << 20))), "a norm of a wide layer's activations"


def test_of_parts_that_overflow_together_the_first_that_is_too_large_is_named() -> None:
    spec = run_spec()
    cut = SegmentCut(0, ((0, COUNT),), [COUNT])
    reduction = SegmentReduction(spec, codec_of("fp32", spec.codecs), 0, cut, None)
    reduction.fill(0, torch.randn(COUNT))
    huge = torch.full((COUNT,), 3e38)
    with pytest.raises(PoisonedPart) as found:
        reduction.add_parts(0, [torch.randn(COUNT), None, huge, huge])
    assert found.value.place == 2
