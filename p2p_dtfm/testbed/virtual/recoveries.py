"""How long one fault holds up eight daemons, exactly: in virtual time no other load takes part.

`python -m p2p_dtfm.testbed.virtual.recoveries --seeds 0-2 [--kinds kill pause] [--loaded SECONDS]`

Each seed founds a swarm of small machines in one room, so that pipelines have several stages. The
swarm trains for a while; then one fault of each kind strikes whom the seed draws. With `--loaded`
all event loops stand still now and then, for up to so long, as on machines that do other things.
The kind `none` does nothing to anybody, and shows whom the peers then call dead all the same.
"""

import argparse
import asyncio
import logging
import random
import re
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from p2p_dtfm.sim.faults.agreement_seeds import seeds_of
from p2p_dtfm.testbed.recovery.phases import PHASES, phases_of
from p2p_dtfm.testbed.recovery.times import (
    Commits,
    Inflicted,
    commits_of,
    longest_without_s,
    usual_step_s,
)
from p2p_dtfm.testbed.virtual.listening import listening
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.testbed.virtual.seeds.beginning import SMALL_GIB
from p2p_dtfm.testbed.virtual.seeds.player import leave_alone_what_is_loaded, memory_disk
from p2p_dtfm.testbed.virtual.seeds.run import make_run
from p2p_dtfm.testbed.virtual.swarm import Swarm, play

NAMES = "abcdefgh"
FLOPS_PER_S = 50_000_000
"""Each machine's speed: steps of this run then take about a third of a second."""
STEPS = 4000
QUIET_S = (8.0, 28.0)
"""How long training goes on before the fault: in some seeds long enough to know who is regular."""
LASTS_S = 8.0
WATCHED_S = 12.0
"""How long the swarm is watched, from the fault on."""
LEAST_STILL_S = 0.1
APART_S = (0.2, 3.0)
"""Time between two moments at which a loaded machine's loop stands still."""


@dataclass
class MeasuredRecovery:
    """What came of one fault."""

    kind: str
    seed: int
    held_up_s: float
    """The longest time without a commit, less a usual step."""
    is_recovered: bool
    """Commits go on before the watch ends. Else the peers are held up for longer than
    `held_up_s`."""
    usual_step_s: float
    phases_s: dict[str, float]
    wrongly_accused: list[str] = field(default_factory=list)
    """Accusations of peers to which nothing was done."""


Done = tuple[Sequence[Peer], Callable[[], object]]
"""The peers that a fault strikes (of a partition, one side), and what ends the fault."""


class DrawnFault:
    """Faults of each kind. Chance says whom a fault strikes."""

    def __init__(self, swarm: Swarm, draws: random.Random) -> None:
        self._swarm = swarm
        self._draws = draws
        self.kinds: dict[str, Callable[[], Done]] = {
            "kill": self._kill,
            "pause": self._pause,
            "machine stops": self._cut_off,
            "one-way cut": lambda: self._cut(both_ways=False),
            "cut": lambda: self._cut(both_ways=True),
            "partition": self._part,
            "none": lambda: ((), lambda: None),
        }

    def _stages(self) -> list[list[Peer]]:
        """The stages of each pipeline, in the order of its layers."""
        api = next(peer.daemon.status_api for peer in self._swarm.peers if peer.daemon)
        assert api is not None
        by_id = {peer.peer_id: peer for peer in self._swarm.peers}
        plan: Any = api.plan_json()["plan"]
        return [[by_id[it["peer_id"]] for it in line["stages"]] for line in plan["pipelines"]]

    def _holder(self) -> Peer:
        return self._draws.choice([peer for line in self._stages() for peer in line])

    def _kill(self) -> Done:
        peer = self._holder()
        self._swarm.kill(peer)
        return (peer,), lambda: None

    def _pause(self) -> Done:
        peer = self._holder()
        self._swarm.pause(peer)
        return (peer,), lambda: self._swarm.resume(peer)

    def _cut_off(self) -> Done:
        """Cuts one peer off for good. Connections to it do not end at once."""
        peer = self._holder()
        for other in self._swarm.peers:
            if other is not peer:
                self._swarm.cut(peer, other)
        return (peer,), lambda: None

    def _cut(self, both_ways: bool) -> Done:
        pairs = [pair for line in self._stages() for pair in pairwise(line)]
        one, other = self._draws.choice(pairs or [tuple(self._swarm.peers[:2])])
        self._swarm.cut(one, other, both_ways)
        return (one, other), lambda: self._swarm.mend(one, other)

    def _part(self) -> Done:
        line = self._draws.choice(self._stages())  # the others can go on, if they are a pipeline
        side = self._draws.sample(line, min(2, len(line)))
        rest = [peer for peer in self._swarm.peers if peer not in side]
        pairs = [(one, other) for one in side for other in rest]
        for pair in pairs:
            self._swarm.cut(*pair)

        def unite() -> None:
            for pair in pairs:
                self._swarm.mend(*pair)

        return side, unite


def recovery_of(
    kind: str, seed: int, run: Path, folder: Path, loaded_s: float = 0.0
) -> MeasuredRecovery:
    """Plays one world with one fault."""
    draws = random.Random(f"recovery {kind} {seed}")

    async def scene(swarm: Swarm) -> MeasuredRecovery:
        await _begin(swarm, run)
        if loaded_s:
            for peer in swarm.peers:
                _load(swarm, peer, loaded_s, random.Random(f"{seed} {peer.name}"))
        await asyncio.sleep(draws.uniform(*QUIET_S))
        with _accusations() as said:
            began_s = swarm.now_s
            struck, end = DrawnFault(swarm, draws).kinds[kind]()
            await asyncio.sleep(LASTS_S)
            end()
            await asyncio.sleep(WATCHED_S - LASTS_S)
        return _judged(swarm, kind, seed, struck, began_s, said)

    return play(seed, folder, scene)


async def _begin(swarm: Swarm, run: Path) -> None:
    swarm.memory_gib, swarm.network.links.are_near = SMALL_GIB, True
    founder = swarm.peer(NAMES[0], run=str(run), expect_peers=len(NAMES))
    swarm.start(founder)
    await swarm.until(lambda: founder.has_run, "the run is founded", 60)
    for name in NAMES[1:]:
        swarm.start(swarm.peer(name, initial_peers=(swarm.address(founder),)))
    for peer in swarm.peers:
        peer.flops_per_s = FLOPS_PER_S
    await swarm.until(lambda: founder.step() >= 0, "a step of all", 120)


def _load(swarm: Swarm, peer: Peer, longest_s: float, draws: random.Random) -> None:
    """Loads a machine: now and then its loop stands still, mostly for about 0.1 s, at times for
    long."""

    def stand_still() -> None:
        share = draws.random() ** 3
        still_s = LEAST_STILL_S + share * max(0.0, longest_s - LEAST_STILL_S)
        if peer.process is not None and not peer.process.is_dead:
            peer.process.stall(int(still_s * 1e9))
        swarm.loop.call_later(still_s + draws.uniform(*APART_S), stand_still)

    swarm.loop.call_later(draws.uniform(*APART_S), stand_still)


@dataclass(frozen=True)
class HeardAccusation:
    """A peer says that another one is out of reach, or holds up a step."""

    by: str
    of_id: str
    text: str

    def is_wrong(self, kind: str, struck: Sequence[Peer]) -> bool:
        """Nothing was done to the accused; in a partition, nothing parts the two."""
        is_struck = self.of_id in {peer.peer_id for peer in struck}
        if kind != "partition":
            return not is_struck
        return is_struck == (self.by in {peer.name for peer in struck})


@contextmanager
def _accusations() -> Iterator[list[HeardAccusation]]:
    said: list[HeardAccusation] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            process, text = PROCESS.get(), record.getMessage()
            if process is not None and (found := re.search(r"cannot reach (\S+): (.*)", text)):
                at_s = process.awake_or_asleep_ns() / 1e9
                text = f"{at_s:.2f} {process.name}: {found[2]}"
                said.append(HeardAccusation(process.peer_name, found[1], text))

    with listening(Listener(), logging.INFO):
        yield said


def _judged(
    swarm: Swarm,
    kind: str,
    seed: int,
    struck: Sequence[Peer],
    began_s: float,
    said: Sequence[HeardAccusation],
) -> MeasuredRecovery:
    histories = {peer.name: [_by_the_world(it) for it in peer.events()] for peer in swarm.peers}
    commits = commits_of(histories)
    usual_s = usual_step_s([commit for commit in commits if commit[1] < began_s])
    gone = () if kind == "partition" else tuple(peer.name for peer in struck)
    fault = Inflicted(kind, gone, 0, began_s, began_s + LASTS_S)
    names = {peer.peer_id: peer.name for peer in swarm.peers}
    return MeasuredRecovery(
        kind,
        seed,
        max(0.0, longest_without_s(commits, began_s, swarm.now_s) - usual_s),
        is_recovered(commits, began_s, swarm.now_s, usual_s),
        usual_s,
        phases_of(histories, commits, fault),
        [
            f"{names.get(it.of_id, it.of_id)} by {it.text}"
            for it in said
            if it.is_wrong(kind, struck)
        ],
    )


def is_recovered(commits: Commits, began_s: float, ends_s: float, usual_s: float) -> bool:
    """Whether commits have come back: the wait at the end of the watch is shorter than an earlier
    one, or at most two steps long."""
    last_s = max((at_s for _, at_s in commits if began_s < at_s <= ends_s), default=began_s)
    left_s = ends_s - last_s
    return left_s <= 2 * usual_s or left_s < longest_without_s(commits, began_s, last_s)


def _by_the_world(event: dict[str, Any]) -> dict[str, Any]:
    """The event with all its times on the world's clock."""
    ahead_s = event["time_s"] - event["at_s"]
    marks = ("stopped_s", "gathered_s", "planned_s")
    return (
        event
        | {name: event[name] - ahead_s for name in marks if name in event}
        | {"time_s": event["at_s"]}
    )


def _line(recovery: MeasuredRecovery) -> str:
    phases = ", ".join(f"{name} {recovery.phases_s.get(name, 0.0):.2f}" for name in PHASES)
    head = f"{recovery.kind} {recovery.seed}: {recovery.held_up_s:.2f} s"
    lines = [f"{head} over {recovery.usual_step_s:.2f} s ({phases})"]
    if not recovery.is_recovered:
        lines.append("    NOT RECOVERED: no step came any more while it was watched")
    return "\n".join(lines + [f"    WRONG: {text}" for text in recovery.wrongly_accused])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=seeds_of, default=range(3), help="such as 0-9")
    parser.add_argument("--kinds", nargs="+", default=[])
    parser.add_argument("--loaded", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    leave_alone_what_is_loaded()
    found: dict[str, list[MeasuredRecovery]] = {}
    with tempfile.TemporaryDirectory(dir=memory_disk()) as scratch:
        run = make_run(Path(scratch), STEPS, saves_every_steps=STEPS)
        kinds = options.kinds or [
            "kill",
            "pause",
            "machine stops",
            "one-way cut",
            "cut",
            "partition",
        ]
        for seed in options.seeds:
            for kind in kinds:
                with tempfile.TemporaryDirectory(dir=memory_disk()) as home:
                    it = recovery_of(kind, seed, run, Path(home), options.loaded)
                found.setdefault(kind, []).append(it)
                print(_line(it), flush=True)
    for kind, recoveries in found.items():
        times_s = [it.held_up_s for it in recoveries]
        wrong = sum(bool(it.wrongly_accused) for it in recoveries)
        median_s, worst_s = statistics.median(times_s), max(times_s)
        not_recovered = sum(not it.is_recovered for it in recoveries)
        print(
            f"{kind}: {median_s:.2f} s, worst {worst_s:.2f}, not recovered in {not_recovered}, "
            f"wrongly accused in {wrong}"
        )


if __name__ == "__main__":
    main()
