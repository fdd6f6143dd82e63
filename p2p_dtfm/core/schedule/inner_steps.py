"""How a pipeline's microbatches are shared out among its inner steps, where replicas step alone.
Engine, planner and simulator share this."""

from itertools import pairwise


def even_ranges(length: int, count: int) -> list[tuple[int, int]]:
    """`length` elements cut into `count` ranges, as equal as whole numbers allow; some may be
    empty."""
    assert length >= 0 and count >= 1, (length, count)
    return list(pairwise(length * number // count for number in range(count + 1)))


def group_sizes(microbatches: int, inner_steps: int) -> list[int]:
    """Microbatches of each inner step that has any; the pipeline drains after each. There is one
    group where replicas do not step alone (`inner_steps` is 0)."""
    if inner_steps <= 1:
        return [microbatches] if microbatches else []
    ranges = even_ranges(microbatches, inner_steps)
    return [end - first for first, end in ranges if end > first]
