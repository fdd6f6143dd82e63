"""What can be said of this machine before it calls anybody."""

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from p2p_dtfm import __version__
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.devices.shares import devices_of, is_several, threads_of_each
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.net.libp2p.descriptors import descriptors_at_most
from p2p_dtfm.ports.granted import granted_memory
from p2p_dtfm.ports.packages import how_to_install
from p2p_dtfm.train.stage.measure import measure_device, select_device

DISK_NEEDED_BYTES = 2 << 30
MEMORY_NEEDED_BYTES = 1 << 30
OPEN_FILES_WANTED = 4096


def check_versions() -> Check:
    names = ("hivemind", "torch")
    versions = {"p2p-dtfm": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Check(
                "versions",
                Grade.FAILED,
                f"{name} is not installed",
                f"install it: {how_to_install(name)}",
            )
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check("versions", Grade.OK, found, facts={"versions": versions})


def check_disk(home: Path) -> Check:
    place = _existing(home)
    free_bytes = shutil.disk_usage(place).free
    found = f"{bytes_text(free_bytes)} free for {home}"
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = f"choose another place: --home DIR, or make {place} a directory you may write to"
        return Check("disk", Grade.FAILED, f"{place} is no directory to write to", fix)
    if free_bytes < DISK_NEEDED_BYTES:
        fix = f"free {bytes_text(DISK_NEEDED_BYTES)} there, or choose another disk: --home DIR"
        return Check("disk", Grade.FAILED, found, fix)
    return Check("disk", Grade.OK, found, facts={"free_bytes": free_bytes})


def check_open_files() -> Check:
    """Check the limit of open files, which a daemon raises by itself as far as it may."""
    at_most = descriptors_at_most()
    found = f"a daemon may open {counted(at_most, 'file')} and streams"
    if at_most >= OPEN_FILES_WANTED:
        return Check("open files", Grade.OK, found)
    fix = f"as root, before the start: ulimit -Hn {OPEN_FILES_WANTED}"
    return Check("open files", Grade.WARNING, found, fix)


def check_memory() -> Check:
    memory = granted_memory()
    where = " in this control group, which may use no more" if memory.is_limited else ""
    found = f"{bytes_text(memory.free_bytes)} of {bytes_text(memory.total_bytes)} are free{where}"
    facts: dict[str, object] = {
        "available_bytes": memory.free_bytes,
        "total_bytes": memory.total_bytes,
    }
    if memory.free_bytes < MEMORY_NEEDED_BYTES:
        mend = "allow this container or service more" if where else "close other programs"
        needed = bytes_text(MEMORY_NEEDED_BYTES)
        fix = f"{mend}: less than {needed} is too little even for a small run"
        return Check("memory", Grade.FAILED, found, fix, facts)
    return Check("memory", Grade.OK, found, facts=facts)


def named_devices(setting: str) -> tuple[str, ...]:
    """Each device that a daemon would compute with, as often as it is listed. Raises
    `UserError`."""
    return devices_of(setting) if is_several(setting) else (setting,)


def check_devices(
    setting: str, threads: int, spec: RunSpec, limit_bytes: int | None = None
) -> Iterator[Check]:
    """Select and time each device as its daemon would; equal ones once. `limit_bytes`: of
    memory."""
    try:
        devices = named_devices(setting)
    except UserError as error:
        yield Check("device", Grade.FAILED, error.cause, error.fixes[0])
        return
    for name in dict.fromkeys(devices):
        yield check_device(name, threads_of_each(threads, len(devices)), spec, limit_bytes)


def check_device(name: str, threads: int, spec: RunSpec, limit_bytes: int | None = None) -> Check:
    """Select the device as the daemon does, and time a block of the run on it."""
    try:
        measured = measure_device(spec, select_device(name), threads or None, limit_bytes)
    except UserError as error:
        return Check("device", Grade.FAILED, error.cause, error.fixes[0])
    block_ms = (measured.block.forward_ns + measured.block.backward_ns) / 1e6
    found = (
        f"{measured.kind}, {measured.name}: {block_ms:.1f} ms for a block of {spec.name}, "
        f"{bytes_text(measured.memory_bytes)} to use"
    )
    facts: dict[str, object] = {"block_ms": round(block_ms, 3), "kind": measured.kind}
    if measured.kind == "cpu" and name == "auto" and Path("/proc/driver/nvidia/version").exists():
        fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
        return Check("device", Grade.WARNING, f"{found}; the NVIDIA GPU is unused", fix, facts)
    return Check("device", Grade.OK, found, facts=facts)


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
