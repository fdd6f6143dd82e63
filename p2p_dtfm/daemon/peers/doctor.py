"""What would keep this machine from taking part, and what to do about each.

Checks run one after another and never raise for what they find; each failure has one fix.
"""

import asyncio
import importlib.metadata
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import psutil

from p2p_dtfm import __version__
from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.home import Home
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.daemon.peers.facts.newcomer import Newcomer
from p2p_dtfm.daemon.peers.facts.worth import ask_worth, words
from p2p_dtfm.daemon.peers.peer_check import check_initial_peer
from p2p_dtfm.daemon.peers.reachability import ReachabilityFinding, ReachabilityService, opening_fix
from p2p_dtfm.net.contacts.addresses import (
    check_listen_address,
    host_and_port,
    is_loopback,
    is_public,
    parse_address,
)
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.train.stage.measure import measure_device, select_device

DISK_NEEDED_BYTES = 2 << 30
MEMORY_NEEDED_BYTES = 1 << 30
OPEN_FILES_WANTED = 4096


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Check:
    """One finding. `fix` says what to do about a warning or a failure."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    def as_json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "verdict": self.verdict,
            "found": self.found,
            "fix": self.fix,
            **self.facts,
        }


@dataclass(frozen=True)
class Examination:
    """What to look at: the settings that the daemon would run with."""

    home: Path
    listen: tuple[str, ...]
    announce: tuple[str, ...]
    initial_peers: tuple[str, ...]
    device: str
    threads: int
    spec: RunSpec
    newcomer: Newcomer
    run_digest: str = ""
    """Of the run to look at; empty: the one that an initial peer trains."""
    is_invited: bool = False
    """Whether what was pasted is an invitation, which the doctor does not use."""


async def examine(what: Examination, tell: Callable[[Check], None]) -> list[Check]:
    """All checks; `tell` hears of each as it is done."""
    done: list[Check] = []

    def add(check: Check) -> None:
        done.append(check)
        tell(check)

    add(check_versions())
    add(check_disk(what.home))
    add(check_open_files())
    add(check_memory())
    add(await asyncio.to_thread(check_device, what.device, what.threads, what.spec))
    running = await asyncio.to_thread(ask_daemon, what.home, "status")
    add(check_daemon(what.home, running))
    for listening in check_ports(what.listen, running is not None):
        add(listening)
    await examine_network(what, running, add)
    return done


def exit_code(checks: Sequence[Check]) -> int:
    """0: nothing failed; 6: only initial peers are out of reach; 2: something else failed."""
    failed = [check.name for check in checks if check.verdict is Verdict.FAILED]
    if not failed:
        return 0
    return 6 if all(name == "initial peer" for name in failed) else 2


def check_versions() -> Check:
    names = ("hivemind", "torch")
    versions = {"p2p-dtfm": __version__, "python": ".".join(map(str, sys.version_info[:3]))}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return Check(
                "versions",
                Verdict.FAILED,
                f"{name} is not installed",
                f"install it: {sys.executable} -m pip install {name}",
            )
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Check("versions", Verdict.OK, found, facts={"versions": versions})


def check_disk(home: Path) -> Check:
    place = _existing(home)
    free_bytes = shutil.disk_usage(place).free
    found = f"{bytes_text(free_bytes)} free for {home}"
    if not place.is_dir() or not os.access(place, os.W_OK):
        fix = f"choose another place: --home DIR, or make {place} a directory you may write to"
        return Check("disk", Verdict.FAILED, f"{place} is no directory to write to", fix)
    if free_bytes < DISK_NEEDED_BYTES:
        fix = f"free {bytes_text(DISK_NEEDED_BYTES)} there, or choose another disk: --home DIR"
        return Check("disk", Verdict.FAILED, found, fix)
    return Check("disk", Verdict.OK, found, facts={"free_bytes": free_bytes})


def check_open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"this process may open {counted(soft, 'file')} and streams"
    if soft >= OPEN_FILES_WANTED:
        return Check("open files", Verdict.OK, found)
    wanted = OPEN_FILES_WANTED if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES_WANTED)
    return Check("open files", Verdict.WARNING, found, f"before the start: ulimit -n {wanted}")


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    found = f"{bytes_text(memory.available)} of {bytes_text(memory.total)} are free"
    facts: dict[str, object] = {"available_bytes": memory.available, "total_bytes": memory.total}
    if memory.available < MEMORY_NEEDED_BYTES:
        fix = (
            f"close other programs: less than {bytes_text(MEMORY_NEEDED_BYTES)} is too little even "
            "for a small run"
        )
        return Check("memory", Verdict.FAILED, found, fix, facts)
    return Check("memory", Verdict.OK, found, facts=facts)


def check_device(name: str, threads: int, spec: RunSpec) -> Check:
    """Selects the device as the daemon does, and times a block of the run on it."""
    try:
        device = select_device(name)
    except UserError as error:
        return Check("device", Verdict.FAILED, error.cause, error.fixes[0])
    measured = measure_device(spec, device, threads or None)
    block_ms = (measured.block.forward_ns + measured.block.backward_ns) / 1e6
    found = (
        f"{measured.kind}, {measured.name}: {block_ms:.1f} ms for a block of {spec.name}, "
        f"{bytes_text(measured.memory_bytes)} to use"
    )
    facts: dict[str, object] = {"block_ms": round(block_ms, 3), "kind": measured.kind}
    if measured.kind == "cpu" and name == "auto" and Path("/proc/driver/nvidia/version").exists():
        fix = "install a build of torch for CUDA: https://pytorch.org/get-started/locally"
        return Check("device", Verdict.WARNING, f"{found}; the NVIDIA GPU is unused", fix, facts)
    return Check("device", Verdict.OK, found, facts=facts)


def check_daemon(home: Path, status: dict[str, object] | None) -> Check:
    if status is None:
        return Check("daemon", Verdict.OK, f"none runs in {Home(home).root}")
    return Check("daemon", Verdict.OK, f"runs: {status['state']}, {status['reason']}")


def check_ports(listen: Sequence[str], daemon_runs: bool) -> Iterator[Check]:
    """Whether the addresses to listen on can be had."""
    for address in listen:
        try:
            host, port = host_and_port(check_listen_address(address))
        except UserError as error:
            yield Check("port", Verdict.FAILED, error.cause, error.fixes[0])
            continue
        if port == 0:
            fix = "to forward a port on a router, or to open one, choose it: " + address.replace(
                "/tcp/0", "/tcp/31330"
            )
            yield Check("port", Verdict.OK, f"{address}: a free one is taken at each start", fix)
            continue
        cause = _cannot_listen(host, port)
        if cause and not daemon_runs:
            fix = f"end the program that uses it (ss -tlnp sport = :{port}), or choose another port"
            yield Check("port", Verdict.FAILED, f"{address}: {cause}", fix)
        else:
            by_whom = "in use, by the daemon that runs" if cause else "free"
            yield Check("port", Verdict.OK, f"{address}: {by_whom}")


def _cannot_listen(host: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error.strerror or str(error)
    return ""


async def examine_network(
    what: Examination, daemon: Mapping[str, object] | None, add: Callable[[Check], None]
) -> None:
    """Whom this machine reaches, and who reaches it; `daemon` is the status of one that runs.

    With an identity for the occasion: the daemon's own may be in use at this moment.
    """
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-doctor-") as scratch:
        try:
            host = await Host.start(Path(scratch) / "identity.key", _free_to_listen(what.listen))
        except UserError as error:
            add(Check("libp2p", Verdict.FAILED, error.cause, error.fixes[0]))
            return
        try:
            add(Check("libp2p", Verdict.OK, "starts"))
            if not what.initial_peers:
                hint = (
                    "give what you were given, to see the way there and its clock: "
                    "--invite LINE, or --initial-peers ADDRESS"
                )
                add(Check("initial peer", Verdict.SKIPPED, "none is given", hint))
            for check in await check_initial_peers(host, what.initial_peers):
                add(check)
            if what.initial_peers:
                add(await check_worth(host, what, daemon))
            addresses = await host.addresses()
            found = await _finding(host, what, daemon)
            add(check_reachability(addresses, what.listen, what.announce, found))
        except Unreachable as error:
            fix = "try again; if it stays so, reinstall hivemind"
            add(Check("libp2p", Verdict.FAILED, error.cause, fix))
        finally:
            await host.close()


async def check_initial_peers(host: Host, addresses: Sequence[str]) -> list[Check]:
    """Of several, as in an invitation, one that answers is enough."""
    findings = [it for address in addresses for it in await check_initial_peer(host, address)]
    checks = [Check(it.name, Verdict(it.verdict), *it.rest) for it in findings]
    peers = [check for check in checks if check.name == "initial peer"]
    if all(check.verdict is Verdict.FAILED for check in peers):
        return checks
    return [
        replace(
            check, verdict=Verdict.WARNING, found=f"{check.found}; another answers, which is enough"
        )
        if check in peers and check.verdict is Verdict.FAILED
        else check
        for check in checks
    ]


async def check_worth(
    host: Host, what: Examination, daemon: Mapping[str, object] | None = None
) -> Check:
    """What the swarm would gain, or gains by a daemon that runs; the device is timed at its run."""
    if what.is_invited:
        found = "its members tell only who has joined, and the doctor joins nothing"
        return Check("worth", Verdict.SKIPPED, found)
    connected = await host.connected_peers()
    reached = [at for at in what.initial_peers if parse_address(at)[0] in connected]
    if not reached:
        return Check("worth", Verdict.SKIPPED, "no initial peer is reached")
    member = str(daemon.get("peer_id", "")) if daemon is not None else ""
    try:
        worth = await ask_worth(host, reached, what.newcomer, what.run_digest, member)
    except UserError as error:
        return Check("worth", Verdict.SKIPPED, error.cause, error.fixes[0])
    if worth is None:
        return Check("worth", Verdict.SKIPPED, "its members publish nothing, or none was measured")
    facts: dict[str, object] = {
        "tokens_per_s_before": round(worth.before, 1),
        "tokens_per_s_after": round(worth.after, 1),
        "layers": list(worth.layers),
        "members": worth.members,
        "links_measured": worth.measured,
    }
    return Check("worth", Verdict.OK, words(worth), facts=facts)


def _free_to_listen(listen: Sequence[str]) -> list[str]:
    """The daemon's addresses, so that forwarded ports are tried; any port where one is taken."""
    return [
        address if not _cannot_listen(*host_and_port(address)) else _any_port(address)
        for address in listen
        if next(check_ports([address], True)).verdict is Verdict.OK
    ]


def _any_port(address: str) -> str:
    parts = address.split("/")
    parts[4] = "0"
    return "/".join(parts)


async def _finding(
    host: Host, what: Examination, daemon: Mapping[str, object] | None
) -> ReachabilityFinding | None:
    """What peers elsewhere say; a daemon that runs has asked them. None: nobody was asked."""
    if daemon is not None and isinstance(reachability := daemon.get("way_in"), dict):
        return ReachabilityFinding(
            Reachability(reachability["reachability"]),
            reachability["reason"],
            reachability["public_host"],
        )
    connected = await host.connected_peers()
    reached = [
        address
        for address in what.initial_peers
        if any(f"/p2p/{peer_id}" in address for peer_id in connected)
    ]
    reachability = await ReachabilityService(host, relays=False).ready()
    try:
        return await reachability.find(reached) if reached else None
    finally:
        await reachability.close()


def check_reachability(
    addresses: Sequence[str],
    listen: Sequence[str],
    announce: Sequence[str],
    finding: ReachabilityFinding | None = None,
) -> Check:
    """What peers elsewhere found; where none was asked, what addresses this machine has."""
    if finding is not None and finding.reachability is not Reachability.UNKNOWN:
        return _as_others_found(addresses, listen, finding)
    if announce:
        return Check(
            "reachability", Verdict.OK, f"others are told {', '.join(announce)} (not tried)"
        )
    hosts = sorted({host_and_port(address)[0] for address in addresses})
    facts: dict[str, object] = {"hosts": hosts}
    public = [host for host in hosts if is_public(host)]
    if public:
        found = f"public address {', '.join(public)}: reachable, unless a firewall drops the port"
        return Check("reachability", Verdict.OK, found, facts=facts)
    if all(map(is_loopback, listen)):
        found = "loopback only: no other machine can join"
        return Check("reachability", Verdict.WARNING, found, "listen on /ip4/0.0.0.0/tcp/0", facts)
    port = next((port for _, port in map(host_and_port, listen) if port), 31330)
    found = f"only private addresses ({', '.join(hosts)}): reachable within this network"
    fix = (
        f"for peers elsewhere: listen on /ip4/0.0.0.0/tcp/{port}, forward TCP port {port} of your "
        f"router to {hosts[0] if hosts else 'this machine'}, and announce /ip4/YOUR-PUBLIC-"
        f"ADDRESS/tcp/{port}"
    )
    return Check("reachability", Verdict.WARNING, found, fix, facts)


def _as_others_found(
    addresses: Sequence[str], listen: Sequence[str], finding: ReachabilityFinding
) -> Check:
    found = f"{finding.reachability.value}: {finding.reason}"
    facts: dict[str, object] = {
        "reachability": finding.reachability.value,
        "public_host": finding.public_host,
    }
    if finding.reachability is Reachability.DIRECT:
        return Check("reachability", Verdict.OK, found, facts=facts)
    relayed = finding.reachability is Reachability.RELAYED
    fix = opening_fix(finding.public_host, addresses, listen)
    if relayed:
        fix = f"nothing must be done; for faster links: {fix}"
    return Check("reachability", Verdict.WARNING if relayed else Verdict.FAILED, found, fix, facts)


def _existing(path: Path) -> Path:
    """The path, or the nearest directory above it that exists."""
    path = path.expanduser().absolute()
    while not path.exists():
        path = path.parent
    return path
