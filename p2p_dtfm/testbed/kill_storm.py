"""A storm kills the daemons of a real swarm, one after another. Each kill comes as soon as the last
dead daemon is replaced, by a new process in the same home or by a newcomer."""

import math
import random
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.recovery.times import Inflicted
from p2p_dtfm.testbed.storm_facts import StormFacts
from p2p_dtfm.testbed.watched_swarm import POLL_S, Say, WatchedSwarm

WHOLE_LIMIT_S = 240.0
"""How long a swarm may take to be whole, at first and after each kill."""
END_LIMIT_S = 60.0
STEPS_AFTER = 5
"""Steps without a kill, at the end."""
ETA_KILLS = 20
"""The estimate of the time left uses so many last kills."""


@dataclass
class StormReport:
    """What a storm did, however far it came."""

    kills: int = 0
    same_home: int = 0
    """Kills after which a new process started in the same home. After the others a newcomer
    came."""
    wrong: list[str] = field(default_factory=list)
    inflicted: list[Inflicted] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    """How long after each kill until all that run were in one view, and had committed a step in
    it."""
    facts: StormFacts = field(default_factory=StormFacts)
    ends_s: float = math.inf
    """When all are told to leave: from then on fewer and fewer compute."""


class KillStorm:
    """`run` goes on until `kills` are done, something is wrong, or `stop` was called."""

    def __init__(
        self,
        swarm: LocalSwarm,
        peer_ids: dict[str, str],
        start_again: Callable[[str, tuple[str, ...]], Child],
        say: Say,
        seed: int,
        total_steps: int,
    ) -> None:
        """`start_again(name, addresses)` starts a daemon of that name as a joiner. `total_steps` is
        that of the run spec."""
        self.report = StormReport()
        self.is_stopped = False
        self.watched = WatchedSwarm(swarm, peer_ids, total_steps)
        self._directory = swarm.directory
        self._start_again = start_again
        self._say = say
        self._chance = random.Random(seed)
        self._began_s = time.time()
        self._newcomers = 0
        self._spared = ""
        """The daemon that is never killed: it lives through all kills."""

    def stop(self) -> None:
        """Ends the storm after the kill under way."""
        self.is_stopped = True

    def run(self, kills: int) -> StormReport:
        """Storms; then all daemons are told to leave, and must end. Blocks."""
        report, watched = self.report, self.watched
        if self._until_whole("the swarm begins", since_s=0.0, newest=None):
            self._tell("all are in one view")
            self._spared = max(watched.running)
            report.facts.sample(watched.children)
            while report.kills < kills and not self.is_stopped and not report.wrong:
                self._kill_one(kills)
            last_step = watched.step + STEPS_AFTER
            self._until(lambda: watched.step >= last_step, "no step after the last kill")
        self._tell("all are told to leave")
        report.ends_s = time.time()
        watched.end_all()
        self._until(lambda: not watched.running, "all were told to leave", END_LIMIT_S)
        report.wrong += [end for end in watched.wrong_ends() if end not in report.wrong]
        return report

    def _kill_one(self, kills: int) -> None:
        report, watched = self.report, self.watched
        name = self._chance.choice(sorted(watched.running - {self._spared}))
        same_home = self._chance.random() < 0.5
        pid, step, began_s = watched.child(name).process.pid, watched.step, time.time()
        watched.kill(name)
        home = self._directory / name
        report.facts.forget_killed(pid, report.facts.used_again(home) if same_home else ())
        report.kills += 1
        report.same_home += same_home
        heir = name if same_home else self._newcomer(name)
        peer_id = peer_id_of(self._directory / heir)
        watched.came(self._start_again(heir, watched.addresses()), peer_id)
        if self._until_whole(f"kill {report.kills} ({name})", time.time(), heir):
            ended_s = time.time()
            report.whole_s.append(ended_s - began_s)
            report.inflicted.append(Inflicted("kill", (name,), step, began_s, ended_s))
            report.facts.sample(child for child in watched.children if child.running)
            by = "starts again" if same_home else f"{heir} comes in its place"
            took = f"whole after {report.whole_s[-1]:.1f} s"
            self._tell(f"kill {report.kills} of {kills}: {name}, {by}; {took}{self._eta(kills)}")

    def _eta(self, kills: int) -> str:
        left = kills - self.report.kills
        each_s = statistics.median(self.report.whole_s[-ETA_KILLS:])
        return f"; about {left * each_s / 60:.0f} min left" if left else ""

    def _newcomer(self, dead: str) -> str:
        """Names another computer. Nobody comes back to the dead one's home, so its weights are
        deleted."""
        self._newcomers += 1
        for path in (self._directory / dead).glob("runs/*/checkpoints"):
            shutil.rmtree(path, ignore_errors=True)
        return f"newcomer-{self._newcomers}"

    def _until_whole(self, what: str, since_s: float, newest: str | None) -> bool:
        """Waits until the newest view has all that run, `newest` has entered it after `since_s`,
        and a step was committed in it."""

        def is_whole() -> bool:
            self.watched.read()
            view = self.watched.newest_view()
            if view is None or not self.watched.all_take_part():
                return False
            if not self.watched.has_stepped(view):
                return False
            if newest is None:
                return True
            entered = self.watched.history(newest).view
            return entered is not None and entered["time_s"] > since_s

        return self._until(is_whole, what)

    def _until(self, is_so: Callable[[], bool], what: str, limit_s: float = WHOLE_LIMIT_S) -> bool:
        """Returns False if that does not come, or a daemon ends by itself meanwhile: see
        `report.wrong`."""
        end_s = time.monotonic() + limit_s
        while not is_so():
            if wrong := self.watched.wrong_ends():
                self.report.wrong += wrong
                return False
            if time.monotonic() > end_s:
                states = "; ".join(self.watched.states())
                text = f"{what}: nothing came of it for {limit_s:.0f} s; {states}"
                self.report.wrong.append(text)
                return False
            time.sleep(POLL_S)
        return True

    def _tell(self, what: str) -> None:
        self._say(time.time() - self._began_s, self.watched.step, what)


def peer_id_of(home: Path) -> str:
    """The id of the peer that lives there; a new one, if none does yet."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    return Identity.load_or_create(Home(home).identity).peer_id
