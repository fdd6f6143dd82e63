"""Memory of frames that come over direct lines, used again once nobody holds it.

Fresh memory is mapped and cleared page by page. For large frames that costs as much as opening what
is sealed. Nobody has to say when a frame is done with: a view of its memory, or a tensor over it,
refers to the memory. So memory that only this pool refers to is free.
"""

import sys

SMALLEST_BYTES = 1 << 17
"""Smaller frames get their memory from the allocator."""
KEPT_BYTES = 32 << 20


class FrameMemory:
    """Used by one thread. Other threads may hold what it gave, and let go of it."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._given: list[bytearray] = []
        """What was given last, the oldest first."""
        self._held_bytes = 0

    def take(self, size_bytes: int) -> bytearray:
        """Memory of exactly `size_bytes`, whatever is in it."""
        if not SMALLEST_BYTES <= size_bytes <= self._kept_bytes:
            return bytearray(size_bytes)
        for place in range(len(self._given)):
            if len(self._given[place]) == size_bytes and self._is_free(place):
                found = self._given.pop(place)
                self._given.append(found)
                return found
        found = bytearray(size_bytes)
        self._given.append(found)
        self._held_bytes += size_bytes
        while self._held_bytes > self._kept_bytes:  # whoever holds the oldest keeps it
            self._held_bytes -= len(self._given.pop(0))
        return found

    def _is_free(self, place: int) -> bool:
        return sys.getrefcount(self._given[place]) <= _ALONE


def _references_of_one_in_a_list() -> int:
    alone = [bytearray(1)]
    return sys.getrefcount(alone[0])


_ALONE = _references_of_one_in_a_list()
