"""Sums of floats, norms and losses, that must be equal at all members, bit for bit.

Python's own `sum` adds one number after the other up to 3.11. From 3.12 on it makes up for what is
rounded away (Neumaier 1974), so a third of the sums of six numbers differ in their last bit. Two
members with different versions would each find that the other states a false norm.
"""

from collections.abc import Iterable


def added_up(numbers: Iterable[float]) -> float:
    """The numbers added one after the other, each sum rounded, as `sum` does it in Python 3.11."""
    total = 0.0
    for number in numbers:
        total += number
    return total
