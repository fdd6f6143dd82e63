"""A local swarm of real daemons, and what is done to it while it trains.

Signals kill, stop and slow processes. The shape file that all daemons follow cuts links and makes
them worse. A full disk is a limit on the size of files.
"""

import math
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.testbed.chaos_schedule import ChaosFault
from p2p_dtfm.testbed.harmed_links import HarmedLinks
from p2p_dtfm.testbed.local_swarm import Child, LocalSwarm
from p2p_dtfm.testbed.recovery.times import Histories, Inflicted
from p2p_dtfm.testbed.watched_swarm import POLL_S, Say, WatchedSwarm, view_in_words

SLICE_S = 0.1
"""A slow peer runs for so long, and then stands still."""
SLOW_FACTOR = 2.0
LONGEST_STANDSTILL_S = 1.0
"""Well below what makes others take the peer for dead: it is slow, not stopped."""
CORRUPT_ELSEWHERE_AFTER_S = 1.0
"""After so long, a byte of anything the peer sends is changed, if nothing went the chosen way."""
CALM_STEPS = 5
"""Steps committed since the last fault ended, before a fault that needs all others to be well."""


@dataclass
class _UnderWay:
    fault: ChaosFault
    step: int
    began_s: float
    end: Callable[[], None]

    @property
    def is_for_good(self) -> bool:
        return self.fault.lasts_s is None

    @property
    def parts(self) -> bool:
        """Whether it takes peers out of the view for good, though their daemons run."""
        return self.is_for_good and self.fault.kind in ("pause", "cut", "partition")

    def is_over(self, time_s: float, step: int) -> bool:
        fault = self.fault
        if fault.kind == "corrupt":
            return time_s >= self.began_s + CORRUPT_ELSEWHERE_AFTER_S
        if fault.lasts_s is None:
            return False
        enough_steps = bool(fault.lasts_steps) and step >= self.step + fault.lasts_steps
        return enough_steps or time_s >= self.began_s + fault.lasts_s


class Chaos:
    """Carries out a schedule on the daemons of `swarm`. `peer_ids` are by name."""

    def __init__(
        self,
        swarm: LocalSwarm,
        shape_path: Path,
        peer_ids: dict[str, str],
        start_again: Callable[[str, tuple[str, ...]], Child],
        say: Say,
        total_steps: int,
    ) -> None:
        """`start_again(name, addresses)` starts a daemon of that name as a joiner. `total_steps` is
        that of the run spec."""
        self.inflicted: list[Inflicted] = []
        self.ends_s = math.inf
        """When all are told to leave."""
        self._watched = WatchedSwarm(swarm, peer_ids, total_steps)
        self._links = HarmedLinks(shape_path, peer_ids)
        self._start_again = start_again
        self._say = say
        self._began_s = time.time()
        self._under_way: list[_UnderWay] = []
        self._calm_from_step = 0
        self._whole_from_step: int | None = None
        """The step at which the newest view came to have every daemon that runs."""

    # the run ------------------------------------------------------------------------------------

    def run(
        self, schedule: tuple[ChaosFault, ...], steps_after: int, deadline_s: float
    ) -> list[str]:
        """Runs until so many steps after the last fault. Returns what went wrong with daemons.
        Blocks.

        At its end the daemons are told to leave, and must end.
        """
        waiting = list(schedule)
        end_s = time.monotonic() + deadline_s
        told_to_leave = False
        while True:
            self._tell_views()
            self._end_what_is_over()
            if waiting and self._is_due(waiting[0]):
                self._inflict(waiting.pop(0))
            is_over = not waiting and all(item.is_for_good for item in self._under_way)
            if is_over and not self._watched.running:
                return self._watched.wrong_ends()
            if is_over and not told_to_leave and self._has_recovered(steps_after):
                told_to_leave = True
                self.release_all()
                self.ends_s = time.time()
                self._tell(self.step, "all are told to leave")
                self._watched.end_all()
            if wrong := self._watched.wrong_ends():
                return wrong
            if time.monotonic() > end_s:
                return self._stuck(waiting)
            time.sleep(POLL_S)

    def _tell_views(self) -> None:
        step = self.step
        for event in self._watched.take_views():
            self._tell(step, view_in_words(event))

    def _has_recovered(self, steps: int) -> bool:
        """Whether so many steps were committed since the last fault, and since all take part."""
        step = self.step
        if not self._all_take_part():
            self._whole_from_step = None
        elif self._whole_from_step is None:
            self._whole_from_step = step
        whole = self._whole_from_step
        return whole is not None and step >= max(whole, self._calm_from_step) + steps

    def release_all(self) -> None:
        """Ends all faults, so that every daemon goes on and can be ended."""
        for item in list(self._under_way):
            self._end(item)

    @property
    def histories(self) -> Histories:
        return self._watched.histories

    @property
    def step(self) -> int:
        """The highest committed step, once the daemons' histories are read up to now."""
        return self._watched.step

    def _is_due(self, fault: ChaosFault) -> bool:
        step = self.step
        if step < fault.at_step:
            return False
        if not fault.is_careful:
            return True
        is_calm = all(item.is_for_good for item in self._under_way)
        left = {name for item in self.inflicted if item.kind == "leave" for name in item.peers}
        is_calm = is_calm and not left & self._watched.running
        return is_calm and self._has_recovered(CALM_STEPS)

    def _all_take_part(self) -> bool:
        """Whether the newest view has every daemon that runs, but those that are away for good."""
        away = {name for item in self._under_way if item.parts for name in item.fault.peers}
        return self._watched.all_take_part(away)

    def _stuck(self, waiting: list[ChaosFault]) -> list[str]:
        return [
            f"the run did not end in time: step {self.step}, "
            f"{counted(len(waiting), 'fault')} to come; " + "; ".join(self._watched.states())
        ]

    # faults -------------------------------------------------------------------------------------

    def _inflict(self, fault: ChaosFault) -> None:
        step, began_s = self.step, time.time()
        if fault.kind != "join" and not set(fault.peers) <= self._watched.running:
            self._tell(step, f"{fault.kind} {' '.join(fault.peers)}: not done, it does not run")
            return
        if fault.kind == "disk full" and not self._watched.child(fault.peers[0]).answers():
            # a daemon without room for its lock and its socket rightly ends, and says why
            self._tell(step, f"{fault.kind} {fault.peers[0]}: not done, it only starts")
            return
        self._tell(step, _in_words(fault))
        end = self._begin(fault)
        self._under_way.append(_UnderWay(fault, step, began_s, end))
        self._calm_from_step = step

    def _end_what_is_over(self) -> None:
        for item in list(self._under_way):
            if item.is_over(time.time(), self.step):
                self._end(item)
                self._calm_from_step = self.step

    def _end(self, item: _UnderWay) -> None:
        item.end()
        self._under_way.remove(item)
        fault, ended_s = item.fault, item.began_s if item.is_for_good else time.time()
        self.inflicted.append(Inflicted(fault.kind, fault.peers, item.step, item.began_s, ended_s))

    def _begin(self, fault: ChaosFault) -> Callable[[], None]:
        """Does the fault. The function that is returned ends it."""
        kind, name = fault.kind, fault.peers[0]
        if kind == "kill":
            self._watched.kill(name)
            return (lambda: None) if fault.lasts_s is None else (lambda: self._join(name))
        if kind == "pause":
            process = self._watched.child(name).process
            process.send_signal(signal.SIGSTOP)
            return lambda: process.send_signal(signal.SIGCONT)
        if kind == "slow":
            factor = fault.factor if fault.factor > 1 else SLOW_FACTOR
            return _slow_down(self._watched.child(name), factor)
        if kind == "disk full":
            return _fill_disk(self._watched.child(name))
        if kind == "leave":
            self._watched.tell_to_leave(name)
            return lambda: None
        if kind == "join":
            self._join(name)
            return lambda: None
        return self._links.harm(fault)

    def _join(self, name: str) -> None:
        stopped = {peer for item in self._under_way for peer in item.fault.peers}
        child = self._start_again(name, self._watched.addresses(stopped))
        self._watched.came(child)
        self._tell(self.step, f"{name} starts")

    def _tell(self, step: int, what: str) -> None:
        self._say(time.time() - self._began_s, step, what)


def _slow_down(child: Child, factor: float) -> Callable[[], None]:
    """Lets the process stand still for part of the time."""
    over = threading.Event()
    still_s = min(SLICE_S * (factor - 1), LONGEST_STANDSTILL_S)
    going_s = still_s / (factor - 1)

    def work() -> None:
        while not over.is_set() and child.running:
            child.process.send_signal(signal.SIGSTOP)
            over.wait(still_s)
            child.process.send_signal(signal.SIGCONT)
            over.wait(going_s)

    thread = threading.Thread(target=work, name=f"slows {child.name}", daemon=True)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()
        child.process.send_signal(signal.SIGCONT)

    return end


def _fill_disk(child: Child) -> Callable[[], None]:
    """No file of the daemon can grow: writing fails as on a full disk, with another error
    number."""
    process = psutil.Process(child.process.pid)
    _, hard = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (0, hard))

    def end() -> None:
        if child.running:
            process.rlimit(psutil.RLIMIT_FSIZE, (resource.RLIM_INFINITY, hard))

    return end


def _in_words(fault: ChaosFault) -> str:
    whom = " ".join(fault.peers)
    by = f" {fault.factor:g} times" if fault.factor > 1 else ""
    if fault.lasts_steps:
        length = f" for {counted(fault.lasts_steps, 'step')}"
    elif fault.lasts_s is None:
        length = " for good"
    else:
        length = f" for {fault.lasts_s:g} s" if fault.lasts_s else ""
    return f"{fault.kind} {whom}{by}{length}"
