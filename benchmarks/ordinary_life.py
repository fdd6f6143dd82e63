"""What people do with their daemons, and what it costs those who train on.

    python -m benchmarks.ordinary_life [--only "kill, and back"] [--peers 3] [--json] [--keep DIR]

A founder and members on this machine, with an endless run of the tests' size, so steps take tens of
milliseconds. Each habit is done once to a swarm that trains: what is said is how long until all
those who should be there are members of one view and commit, from the moment that the one who was
away begins again; the longest span in which those who stayed committed nothing; how many steps they
did over; and whether each committed step has one loss, the same at all. A habit that splits the
swarm, loses a loss or is not over within its limit is told as such, and the program ends with code
1. It begins when all have the data, which takes a second or two here.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from p2p_dtfm.daemon.machine.local_client import call_daemon
from p2p_dtfm.sim.scenario.files import read_run_spec
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm

ENDLESS = 1_000_000
LIMIT_S = 60.0
"""Until all are together again, from the return on."""
SETTLED_STEPS = 8
AWAY_S = 10.0
ASLEEP_S = 30.0
POLL_S = 0.1


class TooLate(Exception):
    """The swarm is not where it should be by now."""


@dataclass
class Row:
    """`back_s`: from the return until all commit together; None where it took too long.
    `longest_s`: without a commit, at whoever stayed; of a swarm that all left there is none."""

    habit: str
    back_s: float | None
    longest_s: float | None
    repeated_steps: int
    one_loss_each: bool
    why: str = ""

    @property
    def is_well(self) -> bool:
        return self.back_s is not None and self.one_loss_each


class House:
    """A founder and members, which train."""

    def __init__(self, directory: Path, peers: int) -> None:
        self.swarm = LocalSwarm(directory, ["--threads", "1", "--dashboard", "off"])
        spec = read_run_spec("tiny")
        small = {"layers": 2, "width": 32, "heads": 2, "context": 64}
        spec = spec.model_copy(
            update={
                "name": "ordinary-life",
                "total_steps": ENDLESS,
                "model": spec.model.model_copy(update=small),
            }
        )
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / "run.json"
        path.write_text(spec.model_dump_json())
        self.line = ["--run", str(path)]
        self.founder, self.address = self.swarm.found(self.line)
        self.members = [self.swarm.join(self.address) for _ in range(peers - 1)]
        self.together(self.all)
        until(self.all_have_data, "all have the data")
        self.steps_on(self.all)

    def all_have_data(self) -> bool:
        counts = {len(list(child.home.glob("runs/*/blobs/*"))) for child in self.members}
        return len(counts) == 1 and min(counts) > 1 and self._have_all_of(self.members[0])

    def _have_all_of(self, child: Child) -> bool:
        """As many files as were prepared, besides manifest and tokenizer."""
        prepared = len(list(self.founder.home.glob("prepared/*/blobs/*")))
        return len(list(child.home.glob("runs/*/blobs/*"))) >= prepared

    @property
    def all(self) -> list[Child]:
        return [self.founder, *self.members]

    def together(self, children: list[Child]) -> None:
        """Wait until they, and nobody else, are members of one view, and commit."""
        until(lambda: are_one(children), "they are members of one view")

    def steps_on(self, children: list[Child], steps: int = SETTLED_STEPS) -> None:
        start = max(map(step_of, children))
        until(lambda: min(map(step_of, children)) >= start + steps, "they train on")

    def again(self, child: Child, arguments: Iterable[str] = ()) -> Child:
        """The same home, with another line or none."""
        back = self.swarm.start(list(arguments), child.name, child.home)
        if child is self.founder:
            self.founder = back
        else:
            self.members[self.members.index(child)] = back
        return back


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TooLate(f"not within {LIMIT_S:.0f} s: {what}")
        time.sleep(POLL_S)


def step_of(child: Child) -> int:
    return (child.status() or {}).get("step") or 0


def are_one(children: list[Child]) -> bool:
    said = [child.status() or {} for child in children]
    views = {json.dumps([facts.get("view"), facts.get("snapshot")]) for facts in said}
    counts = {len(facts.get("members") or ()) for facts in said}
    states = {facts.get("state") for facts in said}
    return len(views) == 1 and counts == {len(children)} and states <= {"training", "spare"}


def kill(*children: Child) -> None:
    for child in children:
        os.kill(child.process.pid, signal.SIGKILL)
    for child in children:
        child.process.wait()


def leave(child: Child) -> None:
    child.process.send_signal(signal.SIGTERM)
    child.process.wait(LIMIT_S)


def sleeps(child: Child, seconds: float) -> None:
    os.kill(child.process.pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(child.process.pid, signal.SIGCONT)


# habits: each returns when whoever was away begins again -----------------------------------------


def pauses(house: House) -> None:
    """pause, ten seconds, resume"""
    child = house.members[0]
    call_daemon(child.home, "pause", "POST")
    until(lambda: (child.status() or {}).get("state") == "paused", "it pauses")
    time.sleep(AWAY_S)
    call_daemon(child.home, "resume", "POST")


def leaves_and_returns(house: House) -> None:
    """a member leaves, and is back at once without a word"""
    leave(house.members[0])
    house.again(house.members[0])


def founder_leaves(house: House) -> None:
    """the founder leaves, and its same line again after ten seconds"""
    leave(house.founder)
    time.sleep(AWAY_S)
    house.again(house.founder, house.line)


def killed_and_back(house: House) -> None:
    """a member is killed, and back at once"""
    kill(house.members[0])
    house.again(house.members[0])


def founder_killed(house: House) -> None:
    """the founder is killed, and back at once"""
    kill(house.founder)
    house.again(house.founder, house.line)


def killed_for_a_while(house: House) -> None:
    """a member is killed, and back after ten seconds"""
    kill(house.members[0])
    time.sleep(AWAY_S)
    house.again(house.members[0])


def sleeps_shortly(house: House) -> None:
    """a member's machine stands still for ten seconds"""
    sleeps(house.members[0], AWAY_S)


def sleeps_longer(house: House) -> None:
    """the founder's machine stands still for half a minute"""
    sleeps(house.founder, ASLEEP_S)


def killed_as_it_takes_part(house: House) -> None:
    """a newcomer is killed as soon as it is a member, and back at once"""
    child = house.swarm.join(house.address)
    house.members.append(child)
    until(lambda: bool((child.status() or {}).get("members")), "it is a member")
    kill(child)
    house.again(child)


def killed_as_it_asks(house: House) -> None:
    """a newcomer is killed while it asks, and its same line again at once"""
    child = house.swarm.join(house.address)
    house.members.append(child)
    until(lambda: "asks" in (child.home / "stderr").read_text(), "it asks to be let in")
    kill(child)
    house.again(child, ["--initial-peers", house.address])


def most_are_killed(house: House) -> None:
    """all but one are killed at once, and back at once"""
    gone = [house.founder, *house.members[:-1]]
    kill(*gone)
    for child in gone:
        house.again(child)


def all_are_killed(house: House) -> None:
    """the power fails: all are killed, and back within seconds"""
    gone = house.all
    kill(*gone)
    for child in gone:
        house.again(child)
        time.sleep(1.0)


HABITS: dict[str, Callable[[House], None]] = {
    "pause, and resume": pauses,
    "leave, and back": leaves_and_returns,
    "founder leaves, and back": founder_leaves,
    "kill, and back": killed_and_back,
    "founder killed, and back": founder_killed,
    "kill, ten seconds, and back": killed_for_a_while,
    "stands still for 10 s": sleeps_shortly,
    "founder stands still for 30 s": sleeps_longer,
    "newcomer killed as a member": killed_as_it_takes_part,
    "newcomer killed as it asks": killed_as_it_asks,
    "all but one killed, and back": most_are_killed,
    "all killed, and back": all_are_killed,
}


def live(habit: str, directory: Path, peers: int) -> Row:
    house = House(directory, peers)
    with house.swarm:
        began_s = time.time()
        HABITS[habit](house)
        back_s, why = time.monotonic(), ""
        took_s: float | None = None
        try:
            house.together(house.all)
            house.steps_on(house.all)
            took_s = time.monotonic() - back_s
        except TooLate as late:
            why = str(late)
        logs = [child.events() for child in house.all]
    steps = [[e for e in events if e["event"] == "step"] for events in logs]
    spans = [longest_s(told, began_s) for told in steps]
    stayed = min((span for span in spans if span is not None), default=None)
    repeated = max(went_back(told) for told in steps)
    return Row(habit, took_s, stayed, repeated, have_one_loss(steps), why)


def longest_s(steps: list[dict], since_s: float) -> float | None:
    """Without a commit. Of the one that committed most steadily this is what the swarm stood
    still."""
    times = [event["time_s"] for event in steps if event["time_s"] >= since_s - 1.0]
    return max((after - one for one, after in pairwise(times)), default=None)


def went_back(steps: list[dict]) -> int:
    """How many steps were committed once more."""
    numbers = [event["step"] for event in steps]
    return sum(max(0, one + 1 - other) for one, other in pairwise(numbers))


def have_one_loss(steps: list[list[dict]]) -> bool:
    """Whatever a step is committed again with, it comes to the same."""
    losses: dict[int, set[float]] = {}
    for told in steps:
        for event in told:
            losses.setdefault(event["step"], set()).add(event["loss"])
    return all(max(found) - min(found) <= 1e-4 for found in losses.values())


def text_of(row: Row) -> str:
    back = f"{row.back_s:6.1f} s" if row.back_s is not None else "  never"
    longest = f"{row.longest_s:6.1f} s" if row.longest_s is not None else "       -"
    same = "" if row.one_loss_each else "; LOSSES DIFFER"
    return f"{row.habit:32} {back} {longest} {row.repeated_steps:6}{same} {row.why}".rstrip()


def main() -> None:
    words, _, epilog = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=words, epilog=epilog)
    parser.add_argument("--only", choices=HABITS, action="append")
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="where homes and logs stay")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.peers < 2:
        parser.error("--peers must be at least 2: somebody has to stay")
    rows = []
    with tempfile.TemporaryDirectory(prefix="ordinary-life-") as scratch:
        root = options.keep or Path(scratch)
        if not options.json:
            print(f"{'what is done':32} {'back':>8} {'longest':>8} {'repeated':>6}", flush=True)
        for number, habit in enumerate(options.only or HABITS):
            try:
                rows.append(live(habit, root / str(number), options.peers))
            except TooLate as late:
                rows.append(Row(habit, None, None, 0, True, str(late)))
            if not options.json:
                print(text_of(rows[-1]), flush=True)
    if options.json:
        print(json.dumps({"peers": options.peers, "rows": [asdict(row) for row in rows]}))
    sys.exit(0 if all(row.is_well for row in rows) else 1)


if __name__ == "__main__":
    main()
