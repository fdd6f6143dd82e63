"""Brief links, by which a record stays small in a large swarm: some measured links, in a few bytes
each, and the peer's coordinate, from which the other links are estimated.

A link is eight bytes: six of a hash of the other peer's id, one for the round trip, one for the
rate. Both are steps of a twelfth of an octave, so a value that is read differs from the measured
one by at most 2.9% (`STEP_ERROR`). Values beyond the ends of the scale become its ends: 10 us and
25 s, 4 KiB/s and 10 GB/s.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from functools import lru_cache
from itertools import pairwise

import msgspec

BRIEF_FROM_MEMBERS = 65
"""With up to 64 members a record names all of its links, exactly. With more it names the best and
some others."""
BEST_LINKS = 16
OTHER_LINKS = 16
BRIEF_LINKS_LIMIT = 64
"""Links that a peer may say at most."""
DIMENSIONS = 8
STEPS_PER_OCTAVE = 12
STEP_ERROR = 0.0294
"""Half a step."""
COORDINATE_LIMIT_US = 1 << 32
_NAME_BYTES = 6
_LINK_BYTES = _NAME_BYTES + 2
_SAMPLE_BYTES = 1 << 20
"""The best links are those on which so many bytes arrive soonest."""


class Link(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The way from this peer to another one, as this peer measured it."""

    round_trip_ns: int
    bytes_per_s: int
    """The outward rate."""


class Coordinate(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a peer is among the others, in microseconds. The round trip between two peers is about
    the distance of their positions plus both heights (Dabek et al. 2004, "Vivaldi")."""

    position_us: tuple[int, ...]
    height_us: int
    """The part of a round trip that all of the peer's lines share."""
    error_ppm: int
    """How far off estimates by this coordinate usually are."""


class BriefLinks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a record holds in place of `PeerRecord.links`."""

    at: Coordinate
    measured: bytes
    """Links of eight bytes as the module describes them; sorted, each name once."""


def _scale(smallest: int) -> tuple[int, ...]:
    """256 values, each a twelfth of an octave above the one before, in whole numbers."""
    return tuple(_root(smallest**STEPS_PER_OCTAVE << step, STEPS_PER_OCTAVE) for step in range(256))


def _root(number: int, degree: int) -> int:
    """The integer part of a root."""
    low, high = 0, 1 << (number.bit_length() // degree + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if middle**degree <= number else (low, middle)
    return low


ROUND_TRIPS_NS = _scale(10_000)
RATES_BYTES_PER_S = _scale(4_096)


def step_of(value: int, scale: tuple[int, ...]) -> int:
    """The index of the scale's value that is nearest to `value`, by ratio."""
    above = bisect_right(scale, value)
    if above in (0, len(scale)):
        return min(above, len(scale) - 1)
    below = above - 1
    return below if value * value <= scale[below] * scale[above] else above


@lru_cache(maxsize=8192)
def short_name(peer_id: str) -> bytes:
    """A hash that tells some thousand peers apart; peers that share one count as unmeasured."""
    return hashlib.blake2b(peer_id.encode(), digest_size=_NAME_BYTES).digest()


def brief(me: str, links: Mapping[str, Link], at: Coordinate) -> BriefLinks:
    """What a record says of these links: the best ones, and some others drawn by lot. The lot
    follows from the ids, and so stays the same."""
    best = sorted(links, key=lambda other: (_sample_ns(links[other]), other))[:BEST_LINKS]
    others = sorted(links.keys() - {*best}, key=lambda other: _lot(me, other))
    chosen = {*best, *others[:OTHER_LINKS]}
    rows = sorted(short_name(other) + bytes(_steps(links[other])) for other in chosen)
    return BriefLinks(at, b"".join(rows))


def _sample_ns(link: Link) -> int:
    rate = max(1, link.bytes_per_s)
    return link.round_trip_ns // 2 + _SAMPLE_BYTES * 1_000_000_000 // rate


def _lot(me: str, other: str) -> bytes:
    return hashlib.blake2b(f"{me} {other}".encode(), digest_size=8).digest()


def _steps(link: Link) -> tuple[int, int]:
    return (
        step_of(link.round_trip_ns, ROUND_TRIPS_NS),
        step_of(link.bytes_per_s, RATES_BYTES_PER_S),
    )


@lru_cache(maxsize=4096)
def measured_links(brief_links: BriefLinks) -> Mapping[bytes, Link]:
    """The links by short name. The result is shared and must not be written to."""
    packed = brief_links.measured
    return {
        packed[at : at + _NAME_BYTES]: Link(
            ROUND_TRIPS_NS[packed[at + _NAME_BYTES]],
            RATES_BYTES_PER_S[packed[at + _NAME_BYTES + 1]],
        )
        for at in range(0, len(packed), _LINK_BYTES)
    }


def fault_of_brief(brief_links: BriefLinks) -> str | None:
    """Why these links cannot be, or None."""
    packed, at = brief_links.measured, brief_links.at
    if len(packed) % _LINK_BYTES or len(packed) > BRIEF_LINKS_LIMIT * _LINK_BYTES:
        return f"links of {len(packed)} bytes"
    names = [packed[n : n + _NAME_BYTES] for n in range(0, len(packed), _LINK_BYTES)]
    if any(one >= other for one, other in pairwise(names)):
        return "links that are not in their order"
    if len(at.position_us) != DIMENSIONS:
        return f"a place of {len(at.position_us)} dimensions"
    if any(abs(part) >= COORDINATE_LIMIT_US for part in at.position_us):
        return "a place that is too far away"
    if not (0 <= at.height_us < COORDINATE_LIMIT_US and 0 <= at.error_ppm <= 10_000_000):
        return "a height or an error that cannot be"
    return None
