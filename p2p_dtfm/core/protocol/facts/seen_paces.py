"""How slow others have seen a peer compute, as their records say it: its own word is not enough.

A record tells only of peers that are notably slower than they say. What it tells is the time of one
microbatch through one layer of each kind, so that it can be held against whatever the peer says of
itself later.
"""

from collections.abc import Mapping, Sequence

PACES_LIMIT = 16
"""Told of by a peer at a time: records stay small."""
LONGEST_PACE_NS = (1 << 60) - 1
VOICES_NEEDED = 2
"""One peer's word is not held against another's."""


def is_possible(paces: Mapping[str, int]) -> bool:
    """Whether a record may tell of these, whoever they are."""
    return len(paces) <= PACES_LIMIT and all(
        0 < pace_ns <= LONGEST_PACE_NS for pace_ns in paces.values()
    )


def middle_of(told: Sequence[int]) -> int:
    """Of what those say who could see it, 0 for each that has nothing to say: the lower middle. So
    more than half of them must have seen it, and it is never more than the most that an honest one
    has seen where most are honest."""
    if len(told) < VOICES_NEEDED:
        return 0
    return sorted(told)[(len(told) - 1) // 2]
