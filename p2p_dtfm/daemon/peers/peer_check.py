"""The way to an initial peer, step by step: its address, its port, libp2p, its run, its clock."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from p2p_dtfm.core.protocol.canonical import decode, digest_bytes
from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL
from p2p_dtfm.daemon.peers.run_source import RunComplete, fault_of_end
from p2p_dtfm.daemon.peers.wire import Hello, Knock, Welcome, pack, protocol_of
from p2p_dtfm.net.contacts.addresses import host_and_port, parse_address
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.libp2p.peer_clock import TOLERANCE_S, read_clock
from p2p_dtfm.net.streams.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.ports import now
from p2p_dtfm.train.data.manifest import MANIFEST_LIMIT_BYTES, parse_manifest

CONNECT_DEADLINE_S = 10.0
ASK_DEADLINE_S = 10.0
WARN_OFFSET_S = 1.0


@dataclass(frozen=True)
class Finding:
    name: Literal["initial peer", "clock"]
    verdict: Literal["ok", "warning", "failed", "skipped"]
    found: str
    fix: str = ""
    facts: dict[str, object] = field(default_factory=dict)

    @property
    def rest(self) -> tuple[str, str, dict[str, object]]:
        return self.found, self.fix, self.facts


async def check_initial_peer(host: Host, address: str) -> list[Finding]:
    """The finding for the peer, and for its clock if the peer is reached."""
    try:
        peer_id, where = parse_address(address)
    except UserError as error:
        return [Finding("initial peer", "failed", error.cause, error.fixes[0])]
    began_s = now.monotonic_s()
    try:
        await host.connect(peer_id, [where], CONNECT_DEADLINE_S)
    except Unreachable as error:
        cause, fix = await _why_not(address, where, peer_id, error)
        return [Finding("initial peer", "failed", cause, fix, {"address": address})]
    connect_ms = (now.monotonic_s() - began_s) * 1e3
    findings = [await _ask(host, address, peer_id, connect_ms)]
    if findings[0].verdict != "failed":
        findings.append(await _check_clock(host, address, peer_id))
    return findings


async def _why_not(address: str, where: str, peer_id: str, error: Unreachable) -> tuple[str, str]:
    """Cause and fix of a connection that did not come about."""
    name, port = host_and_port(where)
    if "/udp/" in where:
        return (
            f"{address}: {error.cause}",
            f"see that UDP port {port} of {name} is open, or use its /tcp/ address",
        )
    try:
        async with asyncio.timeout(CONNECT_DEADLINE_S):
            _, writer = await asyncio.open_connection(name, port)
        writer.close()
    except TimeoutError:
        return (
            f"{name} does not answer on TCP port {port}: something drops the packets",
            f"on {name}, open TCP port {port} in the firewall (sudo ufw allow {port}/tcp), and "
            "forward it on the router in front of it; or your own network lets no such calls out, "
            "as some companies' do: try another one",
        )
    except ConnectionRefusedError:
        return (
            f"nothing listens on TCP port {port} of {name}",
            f"start the daemon there, and see that it prints {address}",
        )
    except OSError as problem:
        return (
            f"{name} cannot be reached: {problem.strerror or problem}",
            f"see that this machine is online, and that {name} is the right address",
        )
    if "peer id mismatch" in error.cause:
        return (
            f"another peer than {peer_id} answers on TCP port {port} of {name}",
            "copy the address again: the daemon there has a new identity",
        )
    return (
        f"TCP port {port} of {name} is open, and libp2p gets no answer there: {error.cause}",
        f"see that p2p-dtfm, and no other program, listens there, and prints {address}",
    )


async def _ask(host: Host, address: str, peer_id: str, connect_ms: float) -> Finding:
    control = ControlPlane(host, _refuse, name="control")  # it only asks: a host serves once
    facts: dict[str, object] = {"address": address, "connect_ms": round(connect_ms, 1)}
    reached = f"{address}: connected in {connect_ms:.0f} ms"
    try:
        reply = await control.call(peer_id, pack(0, Hello(PROTOCOL_VERSION, ())), ASK_DEADLINE_S)
        if (version := protocol_of(reply)) != PROTOCOL_VERSION:
            older = "this program" if version > PROTOCOL_VERSION else "that daemon"
            cause = f"{reached}; speaks protocol {version}, not {PROTOCOL_VERSION}"
            return Finding("initial peer", "failed", cause, f"update {older}", facts)
        welcome = decode(reply, Welcome)
        spec = RunSpec.from_canonical_bytes(welcome.run_spec.payload)
        knock = Knock(digest_bytes(welcome.run_spec.payload))  # a stranger is not told of the data
        await control.call(peer_id, pack(0, knock), ASK_DEADLINE_S)
    except Refused as refusal:
        if REFUSAL in refusal.cause:
            found = f"{reached}; a bootstrap node: join with --run-digest"
            return Finding("initial peer", "ok", found, "", facts)
        if NOT_INVITED in refusal.cause:  # the doctor shows no invitation, since that names a key
            found = f"{reached}; its run is by invitation: its members tell only who has joined"
            return Finding("initial peer", "ok", found, "", facts)
        fix = "try again when it has a run" if "no run" in refusal.cause else "update both programs"
        return Finding(
            "initial peer", "warning", f"{reached}; it says: {refusal.cause}", fix, facts
        )
    except (Unreachable, PeerFault) as error:
        fix = "see that it is a p2p-dtfm daemon of this version"
        return Finding("initial peer", "failed", f"{reached}; then: {error.cause}", fix, facts)
    digest = digest_bytes(welcome.run_spec.payload)
    facts |= {"run_digest": digest}
    if (ended := fault_of_end(peer_id, welcome, spec)) is not None:  # who joins is told the same
        found = f"{reached}; {spec.name}: {ended.cause}"
        facts |= {"complete": isinstance(ended, RunComplete)}
        return Finding("initial peer", "warning", found, ended.fixes[0], facts)
    found = f"{reached}; trains {spec.name} ({digest[:16]}), step {welcome.step}"
    try:
        notes = await _notes(host, peer_id, spec)
    except (TimeoutError, BlobUnavailable, PeerFault) as error:
        return Finding("initial peer", "ok", f"{found}; its data are unknown: {error}", "", facts)
    return Finding("initial peer", "ok", f"{found}; {notes}", "", facts | {"data": notes})


async def _notes(host: Host, peer_id: str, spec: RunSpec) -> str:
    """What the run is trained on, for a person to decide whether to take part."""
    exchange = BlobExchange(host, lambda digest: None, lambda peer, fault: None)
    digest = spec.data.manifest
    with tempfile.TemporaryDirectory() as folder:
        async with asyncio.timeout(ASK_DEADLINE_S):
            path = await exchange.fetch(
                digest, [peer_id], Path(folder) / digest, MANIFEST_LIMIT_BYTES
            )
        return parse_manifest(path.read_bytes(), digest).describe()


async def _check_clock(host: Host, address: str, peer_id: str) -> Finding:
    try:
        reading = await read_clock(host, peer_id, ASK_DEADLINE_S)
    except Unreachable as error:
        return Finding(
            "clock", "skipped", f"{peer_id} does not tell its time: {error.cause}", "try again"
        )
    offset_s = reading.offset_ns / 1e9
    facts: dict[str, object] = {
        "offset_ms": round(offset_s * 1e3, 1),
        "round_trip_ms": round(reading.round_trip_ns / 1e6, 2),
    }
    size = f"{abs(offset_s):.1f} s" if abs(offset_s) >= 1 else f"{abs(offset_s) * 1e3:.0f} ms"
    found = (
        f"this machine's is {size} {'behind' if offset_s > 0 else 'ahead of'} that of {address}, "
        f"round trip {reading.round_trip_ns / 1e6:.1f} ms"
    )
    if abs(offset_s) < WARN_OFFSET_S:
        return Finding("clock", "ok", found, "", facts)
    verdict: Literal["warning", "failed"] = "failed" if abs(offset_s) > TOLERANCE_S else "warning"
    fix = "set the clock, here or there: sudo timedatectl set-ntp true"
    return Finding("clock", verdict, found, fix, facts)


async def _refuse(sender: str, body: bytes) -> bytes:
    raise PeerFault("it only looks around", sender)
