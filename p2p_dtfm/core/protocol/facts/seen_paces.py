"""How slowly others have seen a peer compute, as their records say: its own word is not enough.

A record tells only of peers that are notably slower than they say. It tells the time of one
microbatch through one layer of each kind, to compare with whatever that peer says of itself later.
"""

from collections.abc import Mapping, Sequence

PACES_LIMIT = 16
"""Peers that one record tells of: records stay small."""
LONGEST_PACE_NS = (1 << 60) - 1
VOICES_NEEDED = 2
"""One peer's word is not held against another's."""


def is_possible(paces: Mapping[str, int]) -> bool:
    """Whether a record may tell these paces, whoever the peers are."""
    return len(paces) <= PACES_LIMIT and all(
        0 < pace_ns <= LONGEST_PACE_NS for pace_ns in paces.values()
    )


def middle_of(told: Sequence[int]) -> int:
    """The lower median of what the peers that could see a pace say, with 0 for a silent peer.

    So it is above 0 only if more than half of them have seen a pace. Where most are honest, it is
    at most what some honest peer has seen."""
    if len(told) < VOICES_NEEDED:
        return 0
    return sorted(told)[(len(told) - 1) // 2]
