"""Many seeds: one after the other in this process, or several at once in others."""

import contextlib
import logging
import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.player import Player, leave_alone_what_is_loaded
from p2p_dtfm.testbed.virtual.seeds.schedules.draw import draw
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.seeds.watching.words import last_messages


@dataclass
class SeedOutcome:
    """What came of a seed, and the last words of each daemon in it."""

    seed: int
    played: Played
    said: dict[str, list[str]]
    took_s: float
    """Processor time."""


class NoSuchFault(ValueError):
    """A schedule has no fault at this place."""


def schedule_of(seed: int, places: Sequence[int] | None) -> Schedule:
    """`places` are those of the faults that stay; None: all. Raises `NoSuchFault`."""
    schedule = draw(seed)
    if places is None:
        return schedule
    if beyond := [place for place in places if not 0 <= place < len(schedule.faults)]:
        raise NoSuchFault(f"seed {seed} has faults 0 to {len(schedule.faults) - 1}, no {beyond[0]}")
    return schedule.only(frozenset(places))


def one_by_one(
    player: Player,
    seeds: Sequence[int],
    places: Sequence[int] | None,
    ends_at_s: float,
    around: Callable[[], contextlib.AbstractContextManager[object]],
) -> Iterator[SeedOutcome]:
    """Begins no seed after `ends_at_s`, by the wall's clock."""
    for seed in seeds:
        if time.time() > ends_at_s:
            return
        with around():
            outcome = _played(player, seed, places)
        yield outcome


def several_at_a_time(
    jobs: int, scratch: Path, seeds: Sequence[int], places: Sequence[int] | None, ends_at_s: float
) -> Iterator[SeedOutcome]:
    """Yields outcomes in the order of the seeds. Raises `BrokenProcessPool` where a process ends by
    itself."""
    fresh = multiprocessing.get_context("spawn")
    play = partial(_play_in_process, places=places, ends_at_s=ends_at_s)
    pool = ProcessPoolExecutor(min(jobs, len(seeds)), fresh, _begin_process, (str(scratch),))
    try:
        for outcome in pool.map(play, seeds):
            if outcome is not None:
                yield outcome
    finally:
        pool.shutdown(cancel_futures=True)


def _played(player: Player, seed: int, places: Sequence[int] | None) -> SeedOutcome:
    began_s = time.process_time()
    with last_messages() as said:
        played = player.play(seed, schedule_of(seed, places))
    last_words = {name: list(lines) for name, lines in said.items()}
    return SeedOutcome(seed, played, last_words, time.process_time() - began_s)


_PLAYERS: list[Player] = []
"""The player of a process that plays for another process."""


def _begin_process(scratch: str) -> None:
    logging.getLogger("p2p_dtfm").setLevel(logging.CRITICAL)
    _PLAYERS.append(Player(Path(tempfile.mkdtemp(dir=scratch))))
    leave_alone_what_is_loaded()


def _play_in_process(
    seed: int, places: Sequence[int] | None, ends_at_s: float
) -> SeedOutcome | None:
    if time.time() > ends_at_s:
        return None
    return _played(_PLAYERS[0], seed, places)
