"""When a daemon takes part: in which hours of the day, and until when it is away."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from p2p_dtfm.ports import now

_TIME = r"([01]?\d|2[0-3])(:[0-5]\d)?"
HOURS_PATTERN = rf"^({_TIME}-({_TIME}|24(:00)?))?$"
"""A day ends at 24:00. A later end, as in 00:30-24:30, would mean never, or another time."""
LONGEST_PAUSE_S = 30 * 86_400.0
_WEEKDAY_TELLS_S = 6 * 86_400.0
_LEAVE_AHEAD = timedelta(minutes=2)
"""To hand over takes a step and the transfer of a few layers."""


@dataclass(frozen=True)
class Hours:
    """From `start_minute` of the day until `end_minute`, over midnight if the end is earlier."""

    start_minute: int
    end_minute: int

    @classmethod
    def parse(cls, text: str) -> "Hours | None":
        """The hours in "22-07" or "21:30-06:15". None for the empty text, and for a whole day."""
        if not text:
            return None
        assert re.fullmatch(HOURS_PATTERN, text), text
        start, end = (_minute(part) for part in text.split("-"))
        return None if start == end or (start, end) == (0, 24 * 60) else cls(start, end % (24 * 60))

    @property
    def _length(self) -> timedelta:
        return timedelta(minutes=(self.end_minute - self.start_minute) % (24 * 60))

    def left(self, now: datetime) -> timedelta:
        """How long the daemon is yet to take part; negative outside the hours. It ends early enough
        to hand over."""
        since = timedelta(
            hours=now.hour,
            minutes=now.minute - self.start_minute,
            seconds=now.second,
            microseconds=now.microsecond,
        ) % timedelta(days=1)
        return self._length - min(_LEAVE_AHEAD, self._length / 4) - since

    def contain(self, now: datetime) -> bool:
        return self.left(now) > timedelta(0)

    def __str__(self) -> str:
        return f"{_clock(self.start_minute)}-{_clock(self.end_minute)}"


def _minute(text: str) -> int:
    hour, _, minute = text.partition(":")
    return int(hour) * 60 + int(minute or 0)


def _clock(minute: int) -> str:
    return f"{minute // 60:02}:{minute % 60:02}"


def pause_seconds(parameters: Mapping[str, str]) -> float:
    """The length of the pause that a user on this machine asks for. It is bounded, whatever is
    asked."""
    try:
        asked_s = float(parameters.get("seconds", "0"))
    except ValueError:
        return 0.0
    return min(max(asked_s, 0.0), LONGEST_PAUSE_S) if asked_s == asked_s else 0.0


def for_a_while(until_s: float, now_s: float) -> str:
    """The reason to tell while a peer is away until then."""
    at = now.at_home(until_s)
    day = f"{at:%A}" if until_s - now_s < _WEEKDAY_TELLS_S else f"{at:%A %Y-%m-%d}"
    return f"its user asked for it, until {day} {at:%H:%M}; p2p-dtfm resume ends it before"
