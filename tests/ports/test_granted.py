"""What a control group leaves a process is what it promises, and not what the machine has."""

import os
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.resident_limit import memory_bytes
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.peers.checks.this_machine import check_memory
from p2p_dtfm.ports import granted
from p2p_dtfm.ports.granted import granted_memory, granted_processors, offered_bytes
from p2p_dtfm.train.stage.device.facts import device_facts
from p2p_dtfm.train.stage.measure import measure_device
from tests.core.builders import run_spec

GIB = 1 << 30
UNLIMITED = 9223372036854771712
SECOND = "31 23 0:28 {shown} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw,nsdelegate"
FIRST = "3{at} 23 0:2{at} {shown} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}"


def machine(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    mounts: str,
    member: str,
    files: dict[str, object],
) -> None:
    """One of 64 GiB, of which 48 are free, and 16 cores; `files`: of its control groups."""
    told = {"/proc/self/mountinfo": mounts, "/proc/self/cgroup": member}
    for name, text in {**told, **{f"/sys/fs/cgroup/{at}": it for at, it in files.items()}}.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    has: Any = type("Has", (), {"total": 64 * GIB, "available": 48 * GIB})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: has)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(granted, "ROOT", root)


def container(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`podman run --memory 3g --cpus 2`: its group is the top of what it sees. It holds 1 GiB, half
    of which are pages of files."""
    files: dict[str, object] = {
        "memory.max": 3 * GIB,
        "memory.high": "max",
        "memory.current": GIB,
        "memory.stat": f"anon {GIB // 2}\ninactive_file {GIB // 4}\nactive_file {GIB // 4}",
        "cpu.max": "200000 100000",
    }
    machine(root, monkeypatch, SECOND.format(shown="/"), "0::/", files)


def test_a_container_has_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    container(tmp_path, monkeypatch)
    memory = granted_memory()
    assert memory.is_limited
    assert (memory.total_bytes, memory.free_bytes) == (3 * GIB, 2 * GIB + GIB // 2)
    assert granted_processors() == 2.0


def test_of_groups_within_groups_each_limit_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`systemd-run --user --scope -p MemoryMax=8G`, by a user whose slice has less left, and a
    quota above it."""
    user = "user.slice/user-1000.slice"
    scope = f"{user}/user@1000.service/app.slice/run-1.scope"
    files: dict[str, object] = {
        f"{scope}/memory.max": 8 * GIB,
        f"{scope}/memory.current": GIB,
        f"{scope}/cpu.max": "max 100000",
        f"{user}/memory.max": 20 * GIB,
        f"{user}/memory.high": 10 * GIB,
        f"{user}/memory.current": 7 * GIB,
        "user.slice/cpu.max": "150000 100000",
    }
    machine(tmp_path, monkeypatch, SECOND.format(shown="/"), f"0::/{scope}", files)
    memory = granted_memory()
    assert (memory.total_bytes, memory.free_bytes) == (8 * GIB, 3 * GIB)
    assert granted_processors() == 1.5


def test_a_container_of_the_first_version_that_is_told_where_it_is_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = "/docker/0123"
    mounts = [FIRST.format(at=1, shown=shown, name="memory")]
    mounts += [FIRST.format(at=2, shown=shown, name="cpu,cpuacct")]
    member = f"5:memory:{shown}\n4:cpu,cpuacct:{shown}\n1:name=systemd:{shown}\n0::/"
    files: dict[str, object] = {
        "memory/memory.limit_in_bytes": 2 * GIB,
        "memory/memory.usage_in_bytes": GIB,
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 2}",
        "cpu,cpuacct/cpu.cfs_quota_us": 50_000,
        "cpu,cpuacct/cpu.cfs_period_us": 100_000,
    }
    machine(tmp_path, monkeypatch, "\n".join(mounts), member, files)
    memory = granted_memory()
    assert (memory.total_bytes, memory.free_bytes) == (2 * GIB, GIB + GIB // 2)
    assert granted_processors() == 0.5


@pytest.mark.parametrize(
    "files",
    [
        {"memory.max": "max", "memory.current": GIB, "cpu.max": "max 100000"},
        {"memory.max": UNLIMITED, "memory.current": GIB, "cpu.max": "-1 100000"},
        {"memory.max": "nonsense", "cpu.max": "nonsense"},
        {},
    ],
)
def test_without_a_limit_the_machine_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, object]
) -> None:
    machine(tmp_path, monkeypatch, SECOND.format(shown="/"), "0::/../elsewhere", files)
    memory = granted_memory()
    assert (memory.total_bytes, memory.free_bytes) == (64 * GIB, 48 * GIB)
    assert not memory.is_limited and granted_processors() == 16.0


def test_a_group_that_is_full_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container(tmp_path, monkeypatch)
    (tmp_path / "sys/fs/cgroup/memory.current").write_text(str(5 * GIB))
    assert granted_memory().free_bytes == 0


def test_nobody_promises_more_than_its_container_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: RunSpec
) -> None:
    """Threads, memory, and what is told of the machine."""
    container(tmp_path, monkeypatch)
    settings = Settings(home=tmp_path)
    assert settings.compute_threads == 1, "half of two, not of sixteen"
    assert Settings(home=tmp_path, threads=5).compute_threads == 5
    assert memory_bytes(settings) == 3 * GIB
    assert measure_device(spec, "cpu").memory_bytes == 2 * GIB
    facts = device_facts(torch.device("cpu"))
    assert (facts.memory_bytes, facts.host_free_bytes) == (3 * GIB, 2 * GIB + GIB // 2)
    found = check_memory()
    assert found.found == (
        "2.50 GiB of 3.00 GiB are free in this control group, which may use no more"
    )


@pytest.fixture
def spec() -> RunSpec:
    return run_spec()


@pytest.mark.parametrize(
    ("free_gib", "offered_gib"), [(2, 1.6), (5, 4), (8, 7), (10, 9), (100, 90)]
)
def test_of_little_a_fifth_is_left_then_a_gibibyte_and_of_much_a_tenth(
    free_gib: int, offered_gib: float
) -> None:
    assert offered_bytes(free_gib * GIB) == pytest.approx(offered_gib * GIB, abs=1)
