"""Bytes in flight: what was announced by others and has not been consumed here."""

import collections


class ByteBudget:
    """At most `of_one` bytes for each sender and `in_all` together.

    The first frame of a sender that has none in flight is let through. Otherwise a frame larger
    than the budget would never come, and whoever fills the budget would hold up all others.
    """

    def __init__(self, of_one: int, in_all: int) -> None:
        assert 0 < of_one <= in_all
        self.of_one = of_one
        self.in_all = in_all
        self._held: collections.Counter[str] = collections.Counter()
        self._total = 0

    @property
    def total(self) -> int:
        """Bytes in flight now."""
        return self._total

    def held(self, sender: str) -> int:
        """Bytes in flight of one sender."""
        return self._held[sender]

    def take(self, sender: str, size_bytes: int, goes_first: bool = True) -> bool:
        """Take room for a frame; False if there is none. Without `goes_first` a sender's first
        frame waits for room as well, unless nobody has any in flight."""
        mine = self._held[sender]
        is_first = not mine if goes_first else not self._total
        fits_one = not mine or mine + size_bytes <= self.of_one
        fits_all = self._total + size_bytes <= self.in_all
        if not is_first and not (fits_one and fits_all):
            return False
        self._held[sender] = mine + size_bytes
        self._total += size_bytes
        return True

    def give_back(self, sender: str, size_bytes: int) -> None:
        """What was taken is consumed, or dropped."""
        self._held[sender] -= size_bytes
        self._total -= size_bytes
        if self._held[sender] <= 0:
            assert self._held[sender] == 0, "given back more than was taken"
            del self._held[sender]
