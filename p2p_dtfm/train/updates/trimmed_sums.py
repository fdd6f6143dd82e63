"""A sum that a quarter of those who add to it cannot move far (`sync.sums = "trimmed"`).

Each holder's part is a sum over its own microbatches. Of its mean for a microbatch, value by value,
the largest and the smallest are left out, a quarter of the holders at either end and at least one;
what stays counts for all microbatches. So each value lies between two that honest holders sent
(the trimmed mean of Yin et al. 2018, "Byzantine-robust distributed learning"). Of three holders
that is the median. What is exact is kept so: the order of sums does not depend on who sent what.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec

BLOCK_ELEMENTS = 1 << 16
"""What is sorted stays in the processor's caches."""
LEAST_HOLDERS = 3
"""Of two, nobody can say which one is right: their sum is what it always was."""


def trimmed_over(spec: RunSpec, plan: Plan, segment: Segment) -> tuple[int, ...]:
    """The microbatches of each holder, where the run trims the segment's sums; else nothing."""
    if spec.sync.sums == "plain" or not left_out(len(segment.holders)):
        return ()
    return plan.microbatches_of(segment)


def left_out(holders: int) -> int:
    """How many values at either end."""
    return (holders + 3) // 4 if holders >= LEAST_HOLDERS else 0


def trimmed_sum(
    parts: Sequence[Tensor], microbatches: Sequence[int], target: Tensor | None = None
) -> Tensor:
    """Flat fp32 parts of as many holders, all finite, and the microbatches that each is the sum
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
