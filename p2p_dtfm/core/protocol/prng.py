"""A pseudo-random generator of our own, so that every peer draws the same numbers for ever.

SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators"), in masked
integers. The standard library's generator is not used because its derived methods (`shuffle`,
`choice`) may change between versions.
"""

from typing import TypeVar

Item = TypeVar("Item")

_MASK = (1 << 64) - 1


class Prng:
    """SplitMix64. `below` is biased by less than 2^-32 for each outcome; planning tolerates it."""

    __slots__ = ("state",)

    def __init__(self, seed: int) -> None:
        self.state = seed & _MASK

    def next_u64(self) -> int:
        """The next of 2^64 integers."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self.state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, bound: int) -> int:
        """An integer in 0 .. bound - 1; `bound` is in 1 .. 2^32."""
        assert 1 <= bound <= 1 << 32, bound
        self.state = mixed = (self.state + 0x9E3779B97F4A7C15) & _MASK  # `next_u64`, without a call
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((mixed ^ (mixed >> 31)) >> 32) * bound) >> 32

    def shuffle(self, items: list[Item]) -> None:
        """Fisher and Yates, in place."""
        for index in range(len(items) - 1, 0, -1):
            other = self.below(index + 1)
            items[index], items[other] = items[other], items[index]


def prng_of_digest(digest: str) -> Prng:
    """Seeded by the first 64 bits of a hexadecimal digest."""
    return Prng(int(digest[:16], 16))
