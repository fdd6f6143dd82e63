"""Sums of floats that members must come to alike, bit for bit: norms, losses.

Python's own `sum` adds one number after the other up to 3.11. From 3.12 on it makes up for what is
rounded away (Neumaier 1974): a third of the sums of six numbers differ in their last bit. A member
with the one and a member with the other would each find that the other states a false norm.
"""

from collections.abc import Iterable


def added_up(numbers: Iterable[float]) -> float:
    """One after the other, each sum rounded; as `sum` does it in Python 3.11."""
    total = 0.0
    for number in numbers:
        total += number
    return total
