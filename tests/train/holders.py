"""All holders of a segment in one process: the test hands what one sends to the others."""

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.local_steps import even_ranges
from p2p_dtfm.train.stage.segment_reduction import SegmentCut, SegmentReduction


def exchange(sides: Sequence[SegmentReduction], chunks: int) -> None:
    """Chunk i belongs to holder i modulo the number of holders."""
    for chunk in range(chunks):
        owner = chunk % len(sides)
        parts = [
            None if n == owner else sides[owner].read_part(chunk, bytearray(side.part(chunk)))
            for n, side in enumerate(sides)
        ]
        total = bytes(sides[owner].add_parts(chunk, parts))
        for number, side in enumerate(sides):
            if number != owner:
                side.take_sum(chunk, total)


def reduce_gradients(
    spec: RunSpec, step: int, holders: Sequence[Sequence[LayerState]]
) -> list[SegmentReduction]:
    """Reduce each holder's layers of a segment, in pipeline order; without loss, one chunk a
    holder. All end with the same bits: those of the first's gradients + the second's + the
    third's."""
    lengths = [state.parameter_count for state in holders[0]]
    bounds = even_ranges(sum(lengths), len(holders))
    sides = []
    for states in holders:
        codec, first = codec_of("fp32", spec.codecs), states[0].layer
        cut = SegmentCut(first, bounds, lengths)
        side = SegmentReduction(spec, codec, step, cut, None)
        for state in reversed(states):  # in the order in which backwards end
            side.fill(state.layer, state.gradient_vector())
        sides.append(side)
    exchange(sides, len(bounds))
    assert len({bytes(side.reduced.numpy()) for side in sides}) == 1
    wanted = in_order([torch.cat([s.gradient_vector() for s in states]) for states in holders])
    assert torch.equal(sides[0].reduced, wanted), "chunks must not change the sum"
    return sides


def in_order(values: Sequence[Tensor]) -> Tensor:
    """The fp32 sum, always first + second + third and so on."""
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total
