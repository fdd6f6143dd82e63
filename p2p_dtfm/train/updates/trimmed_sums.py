"""A sum that a quarter of those who add to it cannot move far (`sync.sums = "trimmed"`).

Each holder's part is a sum over its own microbatches. Divided by their number it is the holder's
mean for a microbatch. Of these means, value by value, the largest and the smallest are left out: a
quarter of the holders at either end, and at least one. What stays counts for all microbatches. So
each value lies between two that honest holders sent (the trimmed mean of Yin et al. 2018,
"Byzantine-robust distributed learning"). With three holders that is the median. Values are added in
sorted order, which does not depend on who sent what.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec

BLOCK_ELEMENTS = 1 << 16
"""Elements that are sorted at once: they stay in the processor's caches."""
LEAST_HOLDERS = 3
"""Fewer are not trimmed. Of two, nobody can say which one is right: their sum stays plain."""


def trimmed_over(spec: RunSpec, plan: Plan, segment: Segment) -> tuple[int, ...]:
    """The microbatches of each holder, where the run trims the segment's sums; else nothing."""
    if spec.sync.sums == "plain" or not left_out(len(segment.holders)):
        return ()
    return plan.microbatches_of(segment)


def left_out(holders: int) -> int:
    """How many values are left out at either end."""
    return (holders + 3) // 4 if holders >= LEAST_HOLDERS else 0


def trimmed_sum(
    parts: Sequence[Tensor], microbatches: Sequence[int], target: Tensor | None = None
) -> Tensor:
    """The trimmed sum of flat fp32 parts, all finite. `microbatches`: how many each part is the sum
    of. The target may be one of the parts."""
    least = left_out(len(parts))
    assert len(parts) == len(microbatches) and 2 * least < len(parts) and min(microbatches) > 0
    factor = sum(microbatches) / (len(parts) - 2 * least)
    target = torch.empty_like(parts[0]) if target is None else target
    for start in range(0, len(target), BLOCK_ELEMENTS):
        block = slice(start, start + BLOCK_ELEMENTS)
        means = [part[block] / count for part, count in zip(parts, microbatches, strict=True)]
        kept = torch.stack(means).sort(dim=0).values[least : len(parts) - least]
        total = kept[0]
        for value in kept[1:]:
            total = total + value
        torch.mul(total, factor, out=target[block])
    return target
