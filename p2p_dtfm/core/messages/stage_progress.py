"""How far a stage-holder has come with the microbatches of the open step."""

from collections.abc import Sequence

import msgspec


class StageProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """What a stage-holder has computed, and keeps until the step commits.

    That is the gradients of the first `backwards` microbatches, summed in its buffers; what a
    backward of the other forwarded ones needs; and every boundary tensor and loss that came of it.
    It may have done one forward or backward more than it says, never less.
    """

    first_layer: int
    end_layer: int
    forwarded: tuple[tuple[int, int], ...]
    """Microbatches in the order of their forwards, as runs of (first, count)."""
    backwards: int
    """So many of them, in the same order, have had their backward."""


def as_runs(microbatches: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Consecutive numbers as (first, count)."""
    runs: list[tuple[int, int]] = []
    for number in microbatches:
        if runs and number == sum(runs[-1]):
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return tuple(runs)


def from_runs(runs: Sequence[tuple[int, int]], limit: int) -> tuple[int, ...] | None:
    """The microbatches of such runs; None if they are not different numbers below `limit`."""
    found: dict[int, None] = {}
    for first, count in runs:
        if first < 0 or count < 1 or first + count > limit or len(found) + count > limit:
            return None
        found |= dict.fromkeys(range(first, first + count))
    if len(found) != sum(count for _, count in runs):
        return None
    return tuple(found)
