"""A cache of the segments that the cuts of several pipelines make: in a search, a few kinds of cuts
come again and again."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

KNOWN_LIMIT = 1 << 12


class CutSegment(NamedTuple):
    first: int
    end: int
    """The layers `first .. end - 1`."""
    stages: tuple[int, ...]
    """The position of the stage that holds them, for each pipeline."""


class SegmentTable:
    def __init__(self) -> None:
        self._known: dict[tuple[tuple[int, ...], ...], tuple[CutSegment, ...]] = {}

    def of(self, cuts: tuple[tuple[int, ...], ...]) -> tuple[CutSegment, ...]:
        """The segments in order; `cuts` has those of each pipeline."""
        found = self._known.get(cuts)
        if found is None:
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            found = self._known[cuts] = tuple(_segments(cuts))
        return found


def _segments(cuts: Sequence[tuple[int, ...]]) -> list[CutSegment]:
    edges = sorted({cut for each in cuts for cut in each})
    at = [0] * len(cuts)
    found = []
    for first, end in pairwise(edges):
        for number, each in enumerate(cuts):
            if each[at[number] + 1] <= first:
                at[number] += 1
        found.append(CutSegment(first, end, tuple(at)))
    return found
