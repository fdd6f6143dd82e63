"""Plays seeds: real daemons in virtual time train a small run to its end through faults.

`python -m p2p_dtfm.testbed.virtual.seeds --seeds 0-99 [--story] [--shrink] [--coverage]`

What is done to whom the seed draws: `seeds.faults` has the kinds; from seed 100000 on they are
storms: eight machines, and nothing but kills, one upon the other. Then all is mended, and these
must hold: each daemon comes to the end of the run within a bound; loss, gradient norm and held-out
loss of each step are those of a single process on the same data, at all that have seen it; so are
the layers that are saved of the last step; each step was seen; what a peer tells to be safe is not
computed again, where nobody was out of reach and at most one was killed; nobody has failed, nobody
honest is blamed, and nothing was raised that nobody caught; nobody has more tasks or unread bytes
than it may; whoever is asked to leaves then, and neither task nor file stays behind.
"""

import argparse
import contextlib
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm.testbed.virtual.seeds.faults import Schedule, draw
from p2p_dtfm.testbed.virtual.seeds.player import (
    Player,
    leave_alone_what_is_loaded,
    memory_disk,
)
from p2p_dtfm.testbed.virtual.seeds.playing import Played, Story, last_messages
from p2p_dtfm.testbed.virtual.seeds.reached import Lines, told
from p2p_dtfm.testbed.virtual.seeds.shrink import shrunk

WORLD_BEGAN_S = 1000.0
"""By the virtual clock."""


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """What the daemons log."""
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


def _tell_of_failure(seed: int, played: Played, faults: str) -> None:
    print(f"seed {seed}: {played.problem}", *played.done, sep="\n  ")
    kept = f" --faults {faults}" if faults else ""
    print(f"again: python -m p2p_dtfm.testbed.virtual.seeds --seeds {seed}{kept} --story")


def _shrink(player: Player, seed: int, schedule: Schedule) -> None:
    places, plays = shrunk(schedule, lambda it: bool(player.play(seed, it).problem))
    kept = schedule.only(frozenset(places))
    named = ",".join(map(str, places)) or "none"
    print(f"shrunk in {plays} plays to {len(places)} of {len(schedule.faults)} faults: {named}")
    _tell_of_failure(seed, player.play(seed, kept), named)


def _schedule(seed: int, faults: str | None) -> Schedule:
    schedule = draw(seed)
    if faults is None:
        return schedule
    places = faults.split(",") if faults != "none" else []
    return schedule.only(frozenset(map(int, places)))


def _play_all(player: Player, options: argparse.Namespace) -> int:
    first, _, last = options.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    broken, faults, steps = list[int](), 0, 0
    began_s = time.monotonic()
    for played_count, seed in enumerate(seeds):
        if time.monotonic() - began_s > 60 * options.minutes:
            seeds = seeds[:played_count]
            break
        schedule = _schedule(seed, options.faults)
        with _telling() if options.story else contextlib.nullcontext(), last_messages() as said:
            played = player.play(seed, schedule)
        faults, steps = faults + played.faults, steps + played.steps
        if played.problem:
            broken.append(seed)
            _tell_of_failure(seed, played, options.faults or "")
            for name, lines in sorted(said.items()):
                print(f"  the last words of {name or 'the world'}:", *lines, sep="\n    ")
            if options.shrink:
                _shrink(player, seed, schedule)
        else:
            print(
                f"seed {seed}: {played.ended_s - WORLD_BEGAN_S:.1f} s, {played.faults} faults, "
                f"settled {played.settled_s:.1f} s after them, {played.digest}"
            )
        sys.stdout.flush()
    took_s = time.monotonic() - began_s
    print(
        f"{len(seeds)} seeds, {faults} faults, {len(broken)} broken {broken or ''}, "
        f"{60 * len(seeds) / took_s:.1f} seeds and {60 * steps / took_s:.0f} steps a minute"
    )
    return 1 if broken else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", default="0-9", help="A-B or one")
    parser.add_argument("--story", action="store_true", help="tell what the daemons log")
    parser.add_argument("--shrink", action="store_true", help="leave out faults while it fails")
    parser.add_argument("--faults", help="only these, by their place: 0,3,7, or none")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no seed after so long")
    parser.add_argument("--coverage", action="store_true", help="which statements were come to")
    options = parser.parse_args()
    logging.getLogger("p2p_dtfm").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(dir=memory_disk()) as scratch:
        player = Player(Path(scratch))
        lines = Lines() if options.coverage else None
        with lines.watched() if lines is not None else contextlib.nullcontext():
            leave_alone_what_is_loaded()
            exit_code = _play_all(player, options)
        if lines is not None:
            print(told(lines))
        return exit_code


if __name__ == "__main__":
    sys.exit(main())
