"""Plays seeds: real daemons in virtual time train a small run to its end through faults.

`python -m p2p_dtfm.testbed.virtual.seeds --seeds 0-99 [--jobs 2] [--shrink] [--story] [--coverage]`

The seed draws what is done to whom (`seeds.schedules`). Each family of seeds begins at a number:

100000: storms. There are eight machines, and nothing but kills, one upon the other.
200000: a quarter of the members lies (`lies`), in a run with audits. `seeds.verdict` says what must
        hold for the others.
300000: the run is trained otherwise (`run.RECIPES`): by Muon, by local steps in fp32, sparse or in
        signs, or in eight bits. A single process says nothing of most of these runs. So members are
        compared with one another, bit for bit, and what they learn with the beginning.
400000: one of six or seven members lies, and no machine has room for the whole model.
500000: the faults of the first seeds come sooner one after the other, most of them with steps, in
        short runs. Of these seeds there can be thousands.
600000: the same of the seeds from 200000 on.
700000: a few machines crash in short runs, and after the last step as well. Lanes have no order
        among each other.
800000: faults begin when something is said.
900000: a word is late while somebody dies.
930000: daemons go the rarer of two ways again and again (`surroundings.rarer`).
935000: the same beside liars.
940000: some machines are behind routers, and those that relay for them go away.
950000: somebody is away for long, on slow machines.
960000: dozens join at once, and later a part of all goes at once; from 969000 on two hundred join.
970000: the seeds from 500000 on, with p2pd that do not answer.
980000: a swarm is divided in the middle of a long run.
990000: machines sleep.

Then all is mended, and the following must hold. If the run lasts so long, all running daemons are
in one view within a bound. Each daemon comes to the end of the run within a bound. Each step's
loss, gradient norm and held-out loss are those of a single process on the same data, at all that
saw the step, and the same at all members of one view. So are the layers that are saved of the last
step. Each step was seen. Nobody computes again what a peer told to be safe, where nobody was out of
reach and at most one was killed. No daemon has failed, or ended by itself before the last step. No
honest one is blamed. No daemon that has just woken puts out those that stayed. Nothing was raised
that nobody caught. No daemon has more tasks or unread bytes than it may. Each daemon leaves when it
is asked to, and leaves neither task nor file behind.
"""

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from p2p_dtfm.ports.rarely import POINTS
from p2p_dtfm.sim.faults.agreement_seeds import seeds_of
from p2p_dtfm.testbed.virtual.seeds.many import (
    NoSuchFault,
    SeedOutcome,
    one_by_one,
    schedule_of,
    several_at_a_time,
)
from p2p_dtfm.testbed.virtual.seeds.one_seed import Played
from p2p_dtfm.testbed.virtual.seeds.player import (
    Player,
    leave_alone_what_is_loaded,
    memory_disk,
)
from p2p_dtfm.testbed.virtual.seeds.reached import LinesReached, told
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.seeds.shrink import shrunk
from p2p_dtfm.testbed.virtual.seeds.watching.words import Story
from p2p_dtfm.train.stage.replay.any_processor import compute_alike

MANY_FAULTS = 10
WORLD_BEGAN_S = 1000.0
"""When a world begins, by the virtual clock."""


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Shows what the daemons log, meanwhile."""
    log = logging.getLogger("p2p_dtfm")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Story())
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.CRITICAL)


def _tell_of_failure(seed: int, played: Played, places: Sequence[int] | None) -> None:
    print(f"seed {seed}: {played.problem}", *played.done, sep="\n  ")
    if played.rarer:
        print("  rarer ways:", ", ".join(f"{it} {n}" for it, n in sorted(played.rarer.items())))
    kept = "" if places is None else f" --faults {_named(places)}"
    print(f"again: python -m p2p_dtfm.testbed.virtual.seeds --seeds {seed}{kept} --story")


def _shrink(player: Player, seed: int, schedule: Schedule, problem: str) -> None:
    places, plays = shrunk(schedule, problem, lambda it: player.play(seed, it).problem)
    kept = schedule.only(frozenset(places))
    count = f"{len(places)} of {len(schedule.faults)}"
    print(f"shrunk in {plays} plays to {count} faults: {_named(places)}")
    _tell_of_failure(seed, player.play(seed, kept), places)


def _named(places: Sequence[int]) -> str:
    """The places as `_places_of` reads them."""
    return ",".join(map(str, places)) or "none"


def _places_of(text: str) -> list[int]:
    """Raises `argparse.ArgumentTypeError`."""
    places = text.split(",") if text != "none" else []
    if not all(place.strip().isdecimal() for place in places):
        raise argparse.ArgumentTypeError(f"{text!r} is neither places as 0,3,7 nor none")
    return list(map(int, places))


def _all_of(text: str) -> list[int]:
    """Raises `argparse.ArgumentTypeError`."""
    return [seed for part in text.split(",") for seed in seeds_of(part)]


def _outcomes(players: "_Players", options: argparse.Namespace) -> Iterator[SeedOutcome]:
    ends_at_s = time.time() + 60 * options.minutes
    which = options.seeds, options.faults, ends_at_s
    if options.jobs > 1:
        return several_at_a_time(options.jobs, players.scratch, *which)
    around = _telling if options.story else contextlib.nullcontext
    return one_by_one(players.here(), *which, around)


class _Players:
    """Makes this process's own player only when something is to be played here."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self._here: Player | None = None

    def here(self) -> Player:
        if self._here is None:
            self._here = Player(self.scratch)
        return self._here


def _play_all(players: _Players, options: argparse.Namespace) -> int:
    broken, count, faults, steps = list[int](), 0, 0, 0
    with_liars = told_one = with_many = 0
    rarer: Counter[str] | None = None
    processor_s = 0.0
    began_s = time.monotonic()
    for outcome in _outcomes(players, options):
        seed, played = outcome.seed, outcome.played
        count, faults, steps = count + 1, faults + played.faults, steps + played.steps
        with_liars += bool(played.schedule.liars)
        told_one += played.lies > 0
        with_many += played.faults >= MANY_FAULTS
        processor_s += outcome.took_s
        if played.schedule.goes_rarer_ways:
            rarer = played.rarer + (rarer or Counter())
        if played.problem:
            broken.append(seed)
            _tell_of_failure(seed, played, options.faults)
            for name, lines in sorted(outcome.said.items()):
                print(f"  the last words of {name or 'the world'}:", *lines, sep="\n    ")
            if options.shrink:
                _shrink(players.here(), seed, played.schedule, played.problem)
        else:
            done = f"{played.faults} faults"
            if played.schedule.liars:
                done += f", {played.lies} lies, {played.stayed} stayed"
            if played.schedule.goes_rarer_ways:
                done += f", {played.rarer.total()} rarer ways"
            print(
                f"seed {seed}: {played.ended_s - WORLD_BEGAN_S:.1f} s, {done}, "
                f"settled {played.settled_s:.1f} s after them, {played.digest}"
            )
        sys.stdout.flush()
    took_s = time.monotonic() - began_s
    if with_liars:
        print(f"a lie was told in {told_one} of {with_liars} seeds with liars")
    if rarer is not None:
        print("rarer ways:", ", ".join(f"{point} {rarer[point]}" for point in POINTS))
    print(
        f"{count} seeds, {faults} faults, {len(broken)} broken {broken or ''}, "
        f"{60 * count / took_s:.1f} seeds and {60 * steps / took_s:.0f} steps a minute; "
        f"{with_many} seeds had {MANY_FAULTS} faults and more; "
        f"{processor_s / max(1, count):.2f} s of processor each"
    )
    return 1 if broken else 0


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Ends the process where arguments do not go together, or name what does not exist."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--seeds", default="0-9", type=_all_of, help="A-B or one, or several of these: 0-9,500000"
    )
    parser.add_argument("--story", action="store_true", help="tell what the daemons log")
    parser.add_argument("--shrink", action="store_true", help="leave out faults while it fails")
    parser.add_argument(
        "--faults", type=_places_of, help="only these, by their place: 0,3,7, or none"
    )
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no seed after so long")
    parser.add_argument("--coverage", action="store_true", help="which statements were come to")
    parser.add_argument("--jobs", type=int, default=1, help="so many seeds at once")
    options = parser.parse_args(arguments)
    if options.jobs < 1:
        parser.error("--jobs is at least 1")
    if options.jobs > 1 and (options.story or options.coverage):
        parser.error("--story and --coverage are of one seed after the other: leave out --jobs")
    try:
        for seed in options.seeds if options.faults else ():
            schedule_of(seed, options.faults)
    except NoSuchFault as error:
        parser.error(str(error))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parsed(arguments)
    logging.getLogger("p2p_dtfm").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=memory_disk()) as scratch:
        players = _Players(Path(scratch))
        if options.jobs == 1:
            players.here()  # before lines are watched, and what is loaded is left alone
        lines = LinesReached() if options.coverage else None
        with lines.watched() if lines is not None else contextlib.nullcontext():
            leave_alone_what_is_loaded()
            exit_code = _play_all(players, options)
        if lines is not None:
            print(told(lines))
        return exit_code


if __name__ == "__main__":
    compute_alike()
    sys.exit(main())
