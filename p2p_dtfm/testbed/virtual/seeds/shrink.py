"""Of a seed that fails, the fewest faults with which it still does."""

import re
from collections.abc import Callable

from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule


def shrunk(
    schedule: Schedule, problem: str, play: Callable[[Schedule], str], plays_limit: int = 60
) -> tuple[list[int], int]:
    """The faults that stay, by their place, and how many plays it took.

    Leaves out runs of faults, first long and then short ones, as long as `play` says `problem`, or
    one that differs in its numbers alone: else the end might be at another bug.
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
    """What it says first, whichever steps and seconds it says it of."""
    return re.sub(r"\d+(\.\d+)?", "#", problem.partition("\n")[0])
