"""The fewest faults with which a failing seed still fails."""

import re
from collections.abc import Callable

from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule


def shrunk(
    schedule: Schedule, problem: str, play: Callable[[Schedule], str], plays_limit: int = 60
) -> tuple[list[int], int]:
    """The faults that stay, by their place, and how many plays that took.

    Leaves out runs of faults, first long and then short ones, as long as `play` still says
    `problem`. A
    problem that differs only in numbers counts as the same, and any other as another bug.

    """
    sought = kind_of(problem)
    kept = list(range(len(schedule.faults)))
    plays, length = 0, max(1, len(kept) // 2)
    while True:
        start, found = 0, False
        while start < len(kept) and plays < plays_limit:
            rest = kept[:start] + kept[start + length :]
            plays += 1
            if kind_of(play(schedule.only(frozenset(rest)))) == sought:
                kept, found = rest, True
            else:
                start += length
        if plays >= plays_limit or (length == 1 and not found):
            return kept, plays
        length = max(1, length // 2)


def kind_of(problem: str) -> str:
    """Its first line, without its numbers: steps and seconds do not matter."""
    return re.sub(r"\d+(\.\d+)?", "#", problem.partition("\n")[0])
