"""What would keep this machine from taking part, and what to do about each.

Checks run one after another and never raise for what they find; each failure has one fix.
"""

import asyncio
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.invited.line import InvitationLine
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.machine.devices.shares import threads_of_each
from p2p_dtfm.daemon.machine.home import Home, place_of_run
from p2p_dtfm.daemon.machine.local_client import ask_daemon
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.daemon.peers.checks.kernel import check_kernel, ways_of
from p2p_dtfm.daemon.peers.checks.ports import check_ports, free_to_listen
from p2p_dtfm.daemon.peers.checks.this_machine import (
    check_devices,
    check_disk,
    check_memory,
    check_open_files,
    check_versions,
    named_devices,
)
from p2p_dtfm.daemon.peers.facts.newcomer import Newcomer
from p2p_dtfm.daemon.peers.facts.worth import ask_worth, words
from p2p_dtfm.daemon.peers.guests.own_invitation import OwnInvitation
from p2p_dtfm.daemon.peers.peer_check import check_initial_peer
from p2p_dtfm.daemon.peers.reachability import (
    ReachabilityFinding,
    ReachabilityService,
    opening_fix,
    ports_text,
)
from p2p_dtfm.net.contacts.addresses import host_and_port, is_loopback, is_public, parse_address
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.ports import now


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
    newcomer: Callable[[str, int], Newcomer]
    """`newcomer(device, threads)`: this machine with that device. 0 threads: as many as torch
    likes."""
    memory_limit_bytes: int | None = None
    """Memory that its owner allows; None: what is free."""
    takes_lines: bool = True
    """Whether direct lines come in, at the port above libp2p's."""
    run_digest: str = ""
    """The run to look at; empty: the one that an initial peer trains."""
    invitation: InvitationLine | None = None
    """The line that was pasted, of a run that asks for one. The doctor does not come in by it."""


async def examine(what: Examination, tell: Callable[[Check], None]) -> list[Check]:
    """Run all checks; `tell` hears of each as it is done."""
    done: list[Check] = []

    def add(check: Check) -> None:
        done.append(check)
        tell(check)

    add(check_versions())
    add(check_disk(what.home))
    add(check_open_files())
    add(check_memory())
    devices = check_devices(what.device, what.threads, what.spec, what.memory_limit_bytes)
    for device in await asyncio.to_thread(list, devices):
        add(device)
    running = await asyncio.to_thread(ask_daemon, what.home, "status")
    add(check_daemon(what.home, running))
    members = await asyncio.to_thread(ask_daemon, what.home, "peers") if running else None
    add(check_kernel(ways_of(members, running["peer_id"] if running else None)))
    for listening in check_ports(what.listen, takes_part(running), what.takes_lines):
        add(listening)
    await examine_network(what, running, add)
    return done


def exit_code(checks: Sequence[Check]) -> int:
    """0: nothing failed; 6: only initial peers are out of reach; 2: something else failed."""
    failed = [check.name for check in checks if check.verdict is Grade.FAILED]
    if not failed:
        return 0
    return 6 if all(name == "initial peer" for name in failed) else 2


def takes_part(daemon: Mapping[str, object] | None) -> bool:
    """Whether a daemon takes part, by its status. A paused one has no port, and its status shows
    what was so before."""
    return daemon is not None and daemon["state"] != "paused"


def check_daemon(home: Path, status: dict[str, object] | None) -> Check:
    if status is None:
        return Check("daemon", Grade.OK, f"none runs in {Home(home).root}")
    runs, problems = f"runs: {status['state']}, {status['reason']}", status.get("problems")
    if not isinstance(problems, list) or not problems:
        return Check("daemon", Grade.OK, runs)
    what, more = problems[0]["what"], len(problems) - 1
    told = runs if what in runs else f"{runs}; {what}"
    besides = f"; {counted(more, 'problem')} more: see p2p-dtfm status" if more else ""
    return Check("daemon", Grade.WARNING, f"{told}{besides}", problems[0]["fix"])


async def examine_network(
    what: Examination, daemon: Mapping[str, object] | None, add: Callable[[Check], None]
) -> None:
    """Check which peers this machine reaches, and whether others reach it. `daemon` is the status
    of one that runs.

    This uses an identity for the occasion: the daemon's own may be in use at this moment.
    """
    with tempfile.TemporaryDirectory(prefix="p2p-dtfm-doctor-") as scratch:
        try:
            host = await Host.start(Path(scratch) / "identity.key", free_to_listen(what.listen))
        except UserError as error:
            add(Check("libp2p", Grade.FAILED, error.cause, error.fixes[0]))
            return
        try:
            add(Check("libp2p", Grade.OK, "starts"))
            if what.invitation is not None:
                add(check_invitation(what.home, what.invitation, host.identity))
            if not what.initial_peers:
                hint = (
                    "give what you were given, to see the way there and its clock: "
                    "--invite LINE, or --initial-peers ADDRESS"
                )
                add(Check("initial peer", Grade.SKIPPED, "none is given", hint))
            peers = await check_initial_peers(host, what.initial_peers)
            for check in peers:
                add(check)
            if any(check.facts.get("complete") for check in peers):
                found = "the run is complete: nothing of it is left to compute"
                add(Check("worth", Grade.SKIPPED, found))
            elif what.initial_peers:
                for worth in await check_worth(host, what, daemon):
                    add(worth)
            addresses = await host.addresses()
            add(check_reachability(addresses, what, await _finding(host, what, daemon)))
        except Unreachable as error:
            fix = "try again; if it stays so, reinstall hivemind"
            add(Check("libp2p", Grade.FAILED, error.cause, fix))
        finally:
            await host.close()


def check_invitation(home: Path, line: InvitationLine, identity: Identity) -> Check:
    """Whether anybody can come in by this line, as far as the line itself says. Members may have
    taken it back.

    A home that has come by the line before needs it no more. What it came by is bound to its own
    identity, if it has one yet.
    """
    directory, own = place_of_run(Home(home).root, line.run_digest), Home(home).identity
    try:
        if own.exists():
            identity = Identity.load_or_create(own)
        kept = OwnInvitation(directory, line.run_digest, identity)
        kept.come_by(line)
    except UserError as error:
        return Check("invitation", Grade.FAILED, error.cause, error.fixes[0])
    what = "in time"
    if not kept.came_by(line):
        is_over = (line.expires_s or 0) < now.wall_s()
        what = f"{'expired' if is_over else 'not needed'}: this home keeps to the one it came by"
    return Check("invitation", Grade.OK, f"to run {line.run_digest[:16]}, and {what}")


async def check_initial_peers(host: Host, addresses: Sequence[str]) -> list[Check]:
    """Check the initial peers. Of several, as in an invitation, one that answers is enough."""
    findings = [it for address in addresses for it in await check_initial_peer(host, address)]
    checks = [Check(it.name, Grade(it.verdict), *it.rest) for it in findings]
    peers = [check for check in checks if check.name == "initial peer"]
    if all(check.verdict is Grade.FAILED for check in peers):
        return checks
    return [
        replace(
            check,
            verdict=Grade.WARNING,
            found=f"{check.found}; another answers, which is enough",
        )
        if check in peers and check.verdict is Grade.FAILED
        else check
        for check in checks
    ]


async def check_worth(
    host: Host, what: Examination, daemon: Mapping[str, object] | None = None
) -> list[Check]:
    """What the swarm would gain by each device, each timed at its run. If a daemon runs, what the
    swarm gains by that."""
    if what.invitation is not None:
        found = "its members tell only who has joined, and the doctor joins nothing"
        return [Check("worth", Grade.SKIPPED, found)]
    connected = await host.connected_peers()
    reached = [at for at in what.initial_peers if parse_address(at)[0] in connected]
    if not reached:
        return [Check("worth", Grade.SKIPPED, "no initial peer is reached")]
    try:
        devices = await asyncio.to_thread(named_devices, what.device)
    except UserError as error:
        return [Check("worth", Grade.SKIPPED, error.cause, error.fixes[0])]
    member = str(daemon.get("peer_id", "")) if daemon is not None else ""
    threads = threads_of_each(what.threads, len(devices))
    checks = [
        await _worth_of(host, reached, what, what.newcomer(name, threads), member)
        for name in dict.fromkeys(devices)
    ]
    if len(devices) == 1:
        return checks
    return [
        replace(check, found=f"{name} by itself: {check.found}")
        for name, check in zip(dict.fromkeys(devices), checks, strict=True)
    ]


async def _worth_of(
    host: Host, reached: Sequence[str], what: Examination, newcomer: Newcomer, member: str
) -> Check:
    try:
        worth = await ask_worth(host, reached, newcomer, what.run_digest, member)
    except UserError as error:
        return Check("worth", Grade.SKIPPED, error.cause, error.fixes[0])
    if worth is None:
        return Check("worth", Grade.SKIPPED, "its members publish nothing, or none was measured")
    facts: dict[str, object] = {
        "tokens_per_s_before": round(worth.before, 1),
        "tokens_per_s_after": round(worth.after, 1),
        "layers": list(worth.layers),
        "members": worth.members,
        "links_measured": worth.measured,
    }
    return Check("worth", Grade.OK, words(worth), facts=facts)


async def _finding(
    host: Host, what: Examination, daemon: Mapping[str, object] | None
) -> ReachabilityFinding | None:
    """What peers elsewhere say of this machine's reachability. A daemon that takes part has asked
    them already. None: nobody was asked."""
    told = daemon.get("reachability") if daemon is not None and takes_part(daemon) else None
    if isinstance(told, dict):
        return ReachabilityFinding(
            Reachability(told["reachability"]), told["reason"], told["public_host"]
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
    addresses: Sequence[str], what: Examination, finding: ReachabilityFinding | None = None
) -> Check:
    """Check whether others reach this machine: by what peers elsewhere found, or, if none was
    asked, by this machine's addresses."""
    if finding is not None and finding.reachability is not Reachability.UNKNOWN:
        return _as_others_found(addresses, what, finding)
    if what.announce:
        return Check(
            "reachability",
            Grade.OK,
            f"others are told {', '.join(what.announce)} (not tried)",
        )
    hosts = sorted({host_and_port(address)[0] for address in addresses})
    facts: dict[str, object] = {"hosts": hosts}
    public = [host for host in hosts if is_public(host)]
    if public:
        found = f"public address {', '.join(public)}: reachable, unless a firewall drops the port"
        return Check("reachability", Grade.OK, found, facts=facts)
    if all(map(is_loopback, what.listen)):
        found = "loopback only: no other machine can join"
        return Check("reachability", Grade.WARNING, found, "listen on /ip4/0.0.0.0/tcp/0", facts)
    port = next((port for _, port in map(host_and_port, what.listen) if port), 31330)
    found = f"only private addresses ({', '.join(hosts)}): reachable within this network"
    here = hosts[0] if hosts else "this machine"
    fix = (
        f"for peers elsewhere: listen on /ip4/0.0.0.0/tcp/{port}, forward "
        f"{ports_text(port, what.takes_lines)} of your router to {here}, and announce "
        f"/ip4/YOUR-PUBLIC-ADDRESS/tcp/{port}"
    )
    return Check("reachability", Grade.WARNING, found, fix, facts)


def _as_others_found(
    addresses: Sequence[str], what: Examination, finding: ReachabilityFinding
) -> Check:
    found = f"{finding.reachability.value}: {finding.reason}"
    facts: dict[str, object] = {
        "reachability": finding.reachability.value,
        "public_host": finding.public_host,
    }
    if finding.reachability is Reachability.DIRECT:
        return Check("reachability", Grade.OK, found, facts=facts)
    relayed = finding.reachability is Reachability.RELAYED
    fix = opening_fix(finding.public_host, addresses, what.listen, what.takes_lines)
    if relayed:
        fix = f"nothing must be done; for faster links: {fix}"
    return Check("reachability", Grade.WARNING if relayed else Grade.FAILED, found, fix, facts)
