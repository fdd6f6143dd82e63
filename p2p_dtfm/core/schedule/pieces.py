"""The pieces in which a segment is reduced, and how each is shared out. Engine, planner and
simulator share this."""

from collections.abc import Sequence
from itertools import pairwise

CHUNK_ELEMENTS = 1 << 20
"""4 MiB of fp32: large enough for a fast link, small enough to overlap sending with summing."""
PIECE_ELEMENTS_EACH = 1 << 17
"""Least elements of a piece for each holder: fewer are not worth a message of their own."""


def pieces_of(lengths: Sequence[int], holder_count: int) -> list[range]:
    """A segment's layers (numbered from 0), in the groups in which they are reduced.

    The last layers come first, as a backward ends them first: so a piece travels while the layers
    below it are computed. `lengths` are the layers' elements.
    """
    pieces: list[range] = []
    end, length = len(lengths), 0
    for layer in reversed(range(len(lengths))):
        length += lengths[layer]
        if length >= holder_count * PIECE_ELEMENTS_EACH or not layer:
            pieces.append(range(layer, end))
            end, length = layer, 0
    return pieces


def divide(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `size` in proportion to the weights; the parts add up to it."""
    total = sum(weights)
    edges, seen = [0], 0
    for weight in weights:
        seen += weight
        edges.append(size * seen // total)
    return tuple(after - before for before, after in pairwise(edges))
