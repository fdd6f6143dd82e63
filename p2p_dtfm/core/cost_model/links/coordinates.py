"""Where a peer is among the others, from round trips alone.

Vivaldi (Dabek, Cox, Kaashoek, Morris, SIGCOMM 2004) with a height: peers are masses, and each
measured round trip is a spring of that length between two of them. A peer moves a little along the
spring, and further if it is unsure of its place and the other peer is not. A weak force draws all
towards the origin, so that the swarm as a whole does not drift (Ledlie, Gardner, Seltzer 2007).
"""

import math
from collections import deque
from operator import mul, sub
from statistics import median

from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.facts.brief_links import COORDINATE_LIMIT_US, DIMENSIONS, Coordinate
from p2p_dtfm.core.protocol.prng import prng_of_digest

HEIGHT_LEAST_US = 10.0
ERROR_MOST = 1.5
ERROR_SHARE = 0.25
MOVE_SHARE = 0.25
GRAVITY_RADIUS_US = 150e6
"""At a tenth of a second from the origin a peer sinks by half a microsecond each time."""
RECENT, ENOUGH = 32, 8
FAR_OFF = 4
NOISE_US = 5_000.0
MOST_OFF_US = 500_000.0
"""The error of one round trip counts at most as this much, and at most as `FAR_OFF` times the usual
one. So a peer that lies about its place, and answers late, moves nobody further than an honest one
can. Among forty peers one such liar once moved all others an hour apart."""
MILLION = 1_000_000

ORIGIN = Coordinate((0,) * DIMENSIONS, int(HEIGHT_LEAST_US), int(ERROR_MOST * MILLION))
"""The place of a peer that has measured nothing yet."""


def round_trip_us(one: Coordinate, other: Coordinate) -> int:
    """The round trip between two places, in whole numbers, so that all peers estimate alike."""
    away = tuple(map(sub, one.position_us, other.position_us))
    return math.isqrt(sum(map(mul, away, away))) + one.height_us + other.height_us


class Vivaldi:
    """One peer's own place. Nobody else needs to compute it, so it may be in floats."""

    def __init__(self, me: str, begins_at: Coordinate = ORIGIN) -> None:
        self._position = [float(part) for part in begins_at.position_us]
        self._height_us = float(begins_at.height_us)
        self._error = begins_at.error_ppm / MILLION
        self._recent_us: deque[float] = deque(maxlen=RECENT)
        """How far the last round trips were off their estimates."""
        self._prng = prng_of_digest(digest_bytes(me.encode()))

    @property
    def coordinate(self) -> Coordinate:
        """The place in the form in which it is published."""
        most = COORDINATE_LIMIT_US - 1
        return Coordinate(
            tuple(max(-most, min(most, round(part))) for part in self._position),
            min(most, round(self._height_us)),
            round(self._error * MILLION),
        )

    def observe(self, other: Coordinate, round_trip_ns: int) -> None:
        """Learns from a round trip to the peer at `other`."""
        seen_us = max(1.0, round_trip_ns / 1000)
        away = [a - b for a, b in zip(self._position, other.position_us, strict=True)]
        flat_us = math.hypot(*away)
        estimate_us = flat_us + self._height_us + other.height_us
        other_error = max(other.error_ppm / MILLION, 1e-6)
        trust = self._error / (self._error + other_error) if self._error else 0.0
        off_us = self._believed_us(seen_us - estimate_us)
        off = abs(off_us) / seen_us
        self._error = min(
            ERROR_MOST, off * ERROR_SHARE * trust + self._error * (1 - ERROR_SHARE * trust)
        )
        force_us = MOVE_SHARE * trust * off_us
        if flat_us < 1e-3:
            away = self._anywhere()
            flat_us = math.hypot(*away)
        for number, part in enumerate(away):
            self._position[number] += force_us * part / flat_us
        lifted_us = (self._height_us + other.height_us) * force_us / max(flat_us, seen_us / 10)
        self._height_us = max(HEIGHT_LEAST_US, self._height_us + lifted_us)
        self._sink()

    def _believed_us(self, off_us: float) -> float:
        """The part of an error that counts."""
        most_us = MOST_OFF_US
        if len(self._recent_us) >= ENOUGH:
            most_us = min(most_us, FAR_OFF * median(self._recent_us) + NOISE_US)
        self._recent_us.append(min(abs(off_us), MOST_OFF_US))
        return max(-most_us, min(most_us, off_us))

    def _anywhere(self) -> list[float]:
        """A random direction, for two peers at one place."""
        return [float(self._prng.below(2001) - 1000) or 1.0 for _ in range(DIMENSIONS)]

    def _sink(self) -> None:
        far_us = math.hypot(*self._position)
        pull = MILLION * (far_us / GRAVITY_RADIUS_US) ** 2
        if far_us > 0:
            self._position = [part - pull * part / far_us for part in self._position]
