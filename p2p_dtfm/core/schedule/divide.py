"""Cutting a segment in proportion to weights."""

from itertools import pairwise


def divide(size: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Cut `size` in proportion to the weights; the parts add up to it."""
    total = sum(weights)
    edges, seen = [0], 0
    for weight in weights:
        seen += weight
        edges.append(size * seen // total)
    return tuple(after - before for before, after in pairwise(edges))
