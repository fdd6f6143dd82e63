"""What this process may use of the machine's memory and processors.

A control group may leave a process less than the machine has: a container's group, or one of
systemd's (`MemoryMax`, `CPUQuota`). If a process promises more, the kernel kills it in the middle
of a step, or stops it for most of each tenth of a second.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

ROOT = Path("/")
"""The directory in which /proc and /sys lie."""
UNCOUNTED_BYTES = 1 << 30
_PAGES = ("inactive_file", "active_file")
"""Pages of files. The kernel counts them as used, but takes them back before it refuses memory."""


@dataclass(frozen=True)
class GrantedMemory:
    """`is_limited`: a control group leaves less memory than the machine has, in all or free."""

    total_bytes: int
    free_bytes: int
    is_limited: bool = False


def granted_memory() -> GrantedMemory:
    """The memory granted now. What others in the group take is gone, as on a machine."""
    machine = psutil.virtual_memory()
    total_bytes, free_bytes = int(machine.total), int(machine.available)
    for limit_bytes, left_bytes in _memory_limits():
        total_bytes, free_bytes = min(total_bytes, limit_bytes), min(free_bytes, left_bytes)
    is_limited = (total_bytes, free_bytes) != (machine.total, machine.available)
    return GrantedMemory(total_bytes, free_bytes, is_limited)


def offered_bytes(free_bytes: int) -> int:
    """What a processor offers of the free memory where its user says nothing.

    The rest is for what plans do not count: a fifth of little memory, a gibibyte of more, a tenth
    of much. That is boundary tensors that are kept until a step commits (at most 1 GiB), states
    that arrive, an update in float64, what allocators hold, and what others take later."""
    return free_bytes - max(free_bytes // 10, min(free_bytes // 5, UNCOUNTED_BYTES))


def granted_processors() -> float:
    """How many cores' time this process may use; under a quota, maybe no whole number."""
    return min([float(len(os.sched_getaffinity(0))), *_processor_limits()])


def _memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, what is left of it) of each control group that has a limit on memory."""
    for group in _groups("memory"):
        limits = [_number(group / name) for name in ("memory.max", "memory.high")]
        used_bytes, stat, prefix = _number(group / "memory.current"), "memory.stat", ""
        if used_bytes is None:  # cgroups of version 1
            limits = [_number(group / "memory.limit_in_bytes")]
            used_bytes, prefix = _number(group / "memory.usage_in_bytes"), "total_"
        found = [limit for limit in limits if limit is not None]
        if found:
            pages = _counted(group / stat, tuple(prefix + name for name in _PAGES))
            held_bytes = max(0, (used_bytes or 0) - pages)
            yield min(found), max(0, min(found) - held_bytes)


def _processor_limits() -> Iterator[float]:
    for group in _groups("cpu"):
        quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # "max 100000" where there is no limit
            quota, period = map(int, (group / "cpu.max").read_text().split())
        if quota is not None and period is not None and quota > 0 and period > 0:
            yield quota / period


def _groups(controller: str) -> Iterator[Path]:
    """The control groups that this process is in, the innermost first. The limits of all hold."""
    for mount, shown, is_second in _mounts(controller):
        for line in _lines(ROOT / "proc/self/cgroup"):
            number, controllers, path = (*line.split(":", 2), "", "")[:3]
            is_it = number == "0" if is_second else controller in controllers.split(",")
            if is_it:
                inner = _inside(path, shown)
                place = ROOT / mount.lstrip("/")
                yield from (place / each for each in (inner, *inner.parents))


def _mounts(controller: str) -> Iterator[tuple[str, str, bool]]:
    """(where groups are mounted, which group is at the top, whether it is version 2)."""
    for line in _lines(ROOT / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" or (kind[0] == "cgroup" and controller in kind[2].split(",")):
            yield fields[4], fields[3], kind[0] == "cgroup2"


def _inside(path: str, shown: str) -> PurePosixPath:
    """The path of a group below its mount. A container that is told its path outside of it sees its
    own group at the top."""
    group, top = PurePosixPath(path), PurePosixPath(shown)
    if ".." in group.parts or not group.is_relative_to(top):
        return PurePosixPath()
    return group.relative_to(top)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not on this system
        return []


def _number(path: Path) -> int | None:
    """The number in a file; None where there is no file, or it says "max"."""
    with suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _counted(path: Path, names: tuple[str, ...]) -> int:
    """The sum of these lines of a file of names and numbers."""
    found = (line.split() for line in _lines(path))
    return sum(int(words[1]) for words in found if len(words) == 2 and words[0] in names)
