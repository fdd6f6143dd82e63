"""The hours of the day in which a daemon takes part."""

import re
from dataclasses import dataclass
from datetime import datetime, timedelta

HOURS_PATTERN = r"^(([01]?\d|2[0-3])(:[0-5]\d)?-([01]?\d|2[0-4])(:[0-5]\d)?)?$"
_LEAVE_AHEAD = timedelta(minutes=2)
"""To hand over takes a step and the transfer of a few layers."""


@dataclass(frozen=True)
class Hours:
    """From `start_minute` of the day until `end_minute`, over midnight if that is earlier."""

    start_minute: int
    end_minute: int

    @classmethod
    def parse(cls, text: str) -> "Hours | None":
        """ "22-07" or "21:30-06:15"; None for the empty text, and for a whole day."""
        if not text:
            return None
        assert re.fullmatch(HOURS_PATTERN, text), text
        start, end = (_minute(part) for part in text.split("-"))
        return None if start == end or (start, end) == (0, 24 * 60) else cls(start, end % (24 * 60))

    @property
    def _length(self) -> timedelta:
        return timedelta(minutes=(self.end_minute - self.start_minute) % (24 * 60))

    def left(self, now: datetime) -> timedelta:
        """How long yet to take part; negative outside. It ends early enough to hand over."""
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
