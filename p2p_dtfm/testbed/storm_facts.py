"""What a storm of kills may leave behind: memory that survivors gather, and files of the dead."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.testbed.local_swarm import Child

SETTLED_AFTER = 3
"""Samples of a new process that do not count: what it loads and fetches comes first."""
COMPARED = 3
"""So many samples at either end; a survivor has been sampled at least twice as often."""
LEAST_SAMPLES = SETTLED_AFTER + 2 * COMPARED
_LISTENS = "-listen=/unix"


@dataclass(frozen=True)
class MemoryGrowth:
    """Of those that survived long enough to tell."""

    survivors: int
    total: float
    """Of all of them together, as a part of what they had at first."""
    worst: float


@dataclass
class StormFacts:
    """`sample` after each kill."""

    resident_bytes: dict[int, list[int]] = field(default_factory=dict)
    """Of each process, from its first sample on."""
    _files: dict[int, set[Path]] = field(default_factory=dict)

    def sample(self, children: Iterable[Child]) -> None:
        for child in children:
            try:
                process = psutil.Process(child.process.pid)
                samples = self.resident_bytes.setdefault(process.pid, [])
                samples.append(process.memory_info().rss)
                if process.pid not in self._files:
                    self._files[process.pid] = {Home(child.home).socket, *_sockets_of(process)}
            except psutil.Error:
                continue  # it ends just now

    def forget_killed(self, pid: int) -> None:
        """Who is killed cannot clean up; the next daemon that starts on the machine does, and this
        process where none does any more."""
        for path in self._files.pop(pid, set()):
            path.unlink(missing_ok=True)

    def files_left(self) -> list[str]:
        """Of daemons that ended by themselves."""
        return sorted(
            str(path) for paths in self._files.values() for path in paths if path.exists()
        )

    def growth(self) -> MemoryGrowth | None:
        """None where nobody survived for long enough."""
        before: list[float] = []
        after: list[float] = []
        for samples in self.resident_bytes.values():
            if len(samples) >= LEAST_SAMPLES:
                settled = samples[SETTLED_AFTER:]
                before.append(statistics.median(settled[:COMPARED]))
                after.append(statistics.median(settled[-COMPARED:]))
        if not before:
            return None
        worst = max(last / first for first, last in zip(before, after, strict=True)) - 1
        return MemoryGrowth(len(before), sum(after) / sum(before) - 1, worst)


def _sockets_of(process: psutil.Process) -> set[Path]:
    """Where its p2pd listens for it."""
    found = set()
    for child in process.children():
        for word in child.cmdline():
            if word.startswith(_LISTENS):
                found.add(Path(word.removeprefix(_LISTENS)))
    return found
