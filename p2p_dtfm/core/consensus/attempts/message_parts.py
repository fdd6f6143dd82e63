"""What does not fit into one message goes as several."""

from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
PART_LIMIT_BYTES = 512 * 1024
"""A Gather with more contributions goes as several messages with a part of them each."""


def message_parts(
    items: Iterable[Item], size_of: Callable[[Item], int], first_bytes: int = 0
) -> list[list[Item]]:
    """The items, in order, in one or more parts. Each part is within the limit unless one item
    alone exceeds it; `first_bytes` of the first part are already taken."""
    parts: list[list[Item]] = [[]]
    size = first_bytes
    for item in items:
        size += size_of(item)
        if size > PART_LIMIT_BYTES and parts[-1]:
            parts.append([])
            size = size_of(item)
        parts[-1].append(item)
    return parts
