"""What was given today and in the last seven days. Both change at midnight, even without a step."""

from collections.abc import Iterable, Mapping
from datetime import date, datetime, timedelta

from msgspec.structs import replace

from p2p_dtfm.web.state import ContributionBoard, Given

WEEK_DAYS = 7


def day_of(wall_s: float) -> str:
    """The day by the calendar here, as 2026-01-31."""
    return _date(wall_s).isoformat()


def summed(each: Iterable[Given]) -> Given:
    """The sum of all of them."""
    found = tuple(each)
    fields = Given.__struct_fields__
    return Given(*(sum(getattr(given, name) for given in found) for name in fields))


def newest(days: Mapping[str, Given], wall_s: float) -> dict[str, Given]:
    """The last seven days, today included. A day may have 23 hours, or 25."""
    week = (_date(wall_s) - timedelta(days=back) for back in range(WEEK_DAYS))
    return {day: days[day] for day in map(date.isoformat, week) if day in days}


def dated(board: ContributionBoard, wall_s: float) -> ContributionBoard:
    """The board as it is to be shown now: the same object until the day changes."""
    day = day_of(wall_s)
    if day == board.day:
        return board
    week = newest(board.days, wall_s)
    return replace(
        board, day=day, days=week, today=week.get(day, Given()), week=summed(week.values())
    )


def _date(wall_s: float) -> date:
    return datetime.fromtimestamp(wall_s).astimezone().date()
