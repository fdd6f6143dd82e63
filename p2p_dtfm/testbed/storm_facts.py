"""What a storm of kills may leave behind: memory that grows in survivors, and files of the dead."""

import statistics
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.locks import identity_lock_of
from p2p_dtfm.testbed.local_swarm import Child

SETTLED_AFTER = 3
"""First samples of a new process that do not count, as it loads and fetches meanwhile."""
COMPARED = 3
"""Samples that are compared at either end. A survivor has been sampled at least twice as often."""
LEAST_SAMPLES = SETTLED_AFTER + 2 * COMPARED


@dataclass(frozen=True)
class MemoryGrowth:
    """The growth of processes that survived long enough to tell."""

    survivors: int
    total: float
    """The growth of all of them together, as a part of what they had at first."""
    worst: float
    longest: float
    """The growth of the one that lived longest. A storm spares one daemon, which so has lived
    through all kills: what each of them leaves in a daemon adds up there."""


@dataclass
class StormFacts:
    """Facts of one storm. Call `sample` after each kill."""

    resident_bytes: dict[int, list[int]] = field(default_factory=dict)
    """Samples of each process that was not killed, with its p2pd, by its id. A storm uses up more
    ids than there are, so another process may have a killed one's."""
    lock_folder: Path | None = None
    """Where daemons hold their identities' locks, if not in the usual place."""
    _of_killed: list[list[int]] = field(default_factory=list)
    _files: dict[int, set[Path]] = field(default_factory=dict)

    def sample(self, children: Iterable[Child]) -> None:
        for child in children:
            try:
                process = psutil.Process(child.process.pid)
                samples = self.resident_bytes.setdefault(process.pid, [])
                samples.append(sum(it.memory_info().rss for it in _with_p2pd(process)))
                if process.pid not in self._files:
                    self._files[process.pid] = self._beside(child.home, process)
            except psutil.Error:
                continue  # it ends just now

    def _beside(self, home: Path, process: psutil.Process) -> set[Path]:
        """Files that go with the daemon: its sockets, and its identity's lock."""
        return {*self.used_again(home), *_sockets_of(process)}

    def used_again(self, home: Path) -> set[Path]:
        """Files that each daemon of this home has under the same name: its socket, and the lock of
        its identity."""
        return {Home(home).socket, identity_lock_of(Home(home).identity, self.lock_folder)}

    def forget_killed(self, pid: int, used_again: Container[Path] = ()) -> None:
        """Deletes a killed process's files, since it could not. The next daemon that starts on the
        machine would; after the last, this process must. What is `used_again` stays as the kill
        left it: the next daemon of that home has to get by with it."""
        self._of_killed.append(self.resident_bytes.pop(pid, []))
        for path in self._files.pop(pid, set()):
            if path not in used_again:
                path.unlink(missing_ok=True)

    def files_left(self) -> list[str]:
        """Files that daemons left behind though they ended by themselves."""
        return sorted(
            str(path) for paths in self._files.values() for path in paths if path.exists()
        )

    def growth(self) -> MemoryGrowth | None:
        """The growth of memory; None if nobody survived for long enough."""
        told = (*self._of_killed, *self.resident_bytes.values())
        lives = sorted((life for life in told if len(life) >= LEAST_SAMPLES), key=len)
        if not lives:
            return None
        settled = [life[SETTLED_AFTER:] for life in lives]
        before = [statistics.median(samples[:COMPARED]) for samples in settled]
        after = [statistics.median(samples[-COMPARED:]) for samples in settled]
        grown = [last / first - 1 for first, last in zip(before, after, strict=True)]
        return MemoryGrowth(len(lives), sum(after) / sum(before) - 1, max(grown), grown[-1])


def _with_p2pd(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children()]


def _sockets_of(process: psutil.Process) -> set[Path]:
    """The sockets that the daemon and its p2pd have in the file system."""
    found = set()
    for each in _with_p2pd(process):
        for one in each.net_connections("unix"):
            if str(one.laddr).startswith("/"):
                found.add(Path(str(one.laddr)))
    return found
