"""Puts bugs into the daemon, and says within how many seeds each is found.

`python -m p2p_dtfm.testbed.virtual.planted [--within 100] [--only NAME,NAME] [--list]`

Each bug is looked for from the first seed of its own family, or from `--first` on. A seed finds a
bug if a daemon goes wrong with it, and nothing goes wrong without it. Returns 1 if any bug was not
found.
"""

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

from p2p_dtfm.testbed.virtual.planted.bug import Planted, planted
from p2p_dtfm.testbed.virtual.planted.disks import DISKS
from p2p_dtfm.testbed.virtual.planted.lives import LIVES
from p2p_dtfm.testbed.virtual.planted.routers import WAYS
from p2p_dtfm.testbed.virtual.planted.sleepers import SLEEPERS
from p2p_dtfm.testbed.virtual.planted.states import STATES
from p2p_dtfm.testbed.virtual.planted.told import TOLD
from p2p_dtfm.testbed.virtual.planted.verdicts import VERDICTS
from p2p_dtfm.testbed.virtual.planted.waiting import WAITING
from p2p_dtfm.testbed.virtual.seeds.player import (
    Player,
    leave_alone_what_is_loaded,
    memory_disk,
)
from p2p_dtfm.train.stage.replay.any_processor import compute_alike

BUGS = (*WAITING, *STATES, *DISKS, *LIVES, *VERDICTS, *TOLD, *WAYS, *SLEEPERS)


class Search:
    """Looks for bugs, and remembers which seeds fail by themselves."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._fails: dict[int, bool] = {}

    def _fails_by_itself(self, seed: int) -> bool:
        if seed not in self._fails:
            self._fails[seed] = bool(self._player.play(seed).problem)
        return self._fails[seed]

    def found(self, bug: Planted, within: int, first: int | None = None) -> tuple[int, str] | None:
        """How many seeds it took, and what the last seed says of a daemon; None: not found."""
        first = bug.first if first is None else first
        for seed in range(first, first + within):
            with planted(bug):
                played = self._player.play(seed)
            is_wrong = bool(played.problem) and not played.is_of_the_world
            if is_wrong and not self._fails_by_itself(seed):
                return seed - first + 1, played.problem
        return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--within", type=int, default=100, help="seeds for each")
    parser.add_argument("--first", type=int, help="the first seed, instead of each bug's own")
    parser.add_argument("--only", help="these, by name, with commas between")
    parser.add_argument("--list", action="store_true", help="say which there are")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else [bug.name for bug in BUGS]
    if unknown := sorted({*names} - {bug.name for bug in BUGS}):
        parser.error(f"no bug is called {', '.join(unknown)}; --list says which there are")
    if options.within < 1 or (options.first or 0) < 0:
        parser.error("--within is at least 1, --first at least 0")
    bugs = [bug for bug in BUGS if bug.name in names]
    if options.list:
        for bug in bugs:
            print(f"{bug.name:24} from {bug.first} on: {bug.what}")
        return 0
    logging.getLogger("p2p_dtfm").setLevel(logging.CRITICAL)
    missed = 0
    with tempfile.TemporaryDirectory(dir=memory_disk()) as scratch:
        search = Search(Player(Path(scratch)))
        leave_alone_what_is_loaded()
        for bug in bugs:
            began_s = time.monotonic()
            found = search.found(bug, options.within, options.first)
            missed += found is None
            took = f"{time.monotonic() - began_s:.0f} s"
            if found is None:
                print(f"{bug.name:24} not within {options.within} seeds, {took}: {bug.what}")
            else:
                count, problem = found
                first = bug.first if options.first is None else options.first
                where = f"seed {first + count - 1}, of {count}, {took}"
                print(f"{bug.name:24} {where}: {problem.splitlines()[0][:120]}")
            sys.stdout.flush()
    print(f"{len(bugs) - missed} of {len(bugs)} found")
    return 1 if missed else 0


if __name__ == "__main__":
    compute_alike()
    sys.exit(main())
