"""The port at which p2pd listens, whether the ports to listen on are free, and which program has
them.

p2pd listens with SO_REUSEPORT: two of them share one port without a word, and each gets some of the
other's calls. So the port is first tried without SO_REUSEPORT.
"""

import asyncio
import errno
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.net.contacts.addresses import far_end
from p2p_dtfm.net.errors import one_line
from p2p_dtfm.ports import now

PATIENCE_S = 3.0
"""The p2pd of a daemon that was just killed has its port a little longer."""
TRY_AGAIN_S = 0.1
_KINDS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
_FAMILIES = {"ip4": socket.AF_INET, "ip6": socket.AF_INET6}


@dataclass(frozen=True)
class _Endpoint:
    family: socket.AddressFamily
    kind: socket.SocketKind
    host: str
    port: int


def port_listened_at(listen: Sequence[str], announce: Sequence[str], own: Sequence[str]) -> int:
    """The TCP port of this machine at which its p2pd listens; 0 where not known. Announced
    addresses stand in place of all its `own` ones, and may be those of a router that forwards
    another port."""
    chosen = [it.port for at in listen if (it := _endpoint(at)) and it.kind == _KINDS["tcp"]]
    if chosen or announce:
        return chosen[0] if chosen else 0
    return next((end[1] for at in own if (end := far_end(at)) is not None), 0)


async def refuse_taken_ports(listen: Sequence[str], patience_s: float = PATIENCE_S) -> None:
    """Raise `UserError` if a port to listen on is taken, naming its owner if that can be known.
    `listen`: well-formed multiaddrs. Port 0, a name, and a host that is not this machine's are left
    to p2pd."""
    endpoints = [found for address in listen if (found := _endpoint(address)) is not None]
    end_s = now.monotonic_s() + patience_s
    for endpoint in endpoints:
        while _is_taken(endpoint):
            if now.monotonic_s() >= end_s:
                raise await asyncio.to_thread(_taken, endpoint)
            await asyncio.sleep(TRY_AGAIN_S)


def _endpoint(address: str) -> _Endpoint | None:
    parts = address.strip("/").split("/")
    if len(parts) < 4 or parts[0] not in _FAMILIES or parts[2] not in _KINDS or int(parts[3]) == 0:
        return None
    return _Endpoint(_FAMILIES[parts[0]], _KINDS[parts[2]], parts[1], int(parts[3]))


def _is_taken(endpoint: _Endpoint) -> bool:
    with socket.socket(endpoint.family, endpoint.kind) as probe:
        if endpoint.kind == socket.SOCK_STREAM:
            # Connections that ended a moment ago do not count; a listener does.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if endpoint.family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def _taken(endpoint: _Endpoint) -> UserError:
    kind = "TCP" if endpoint.kind == socket.SOCK_STREAM else "UDP"
    owner, looks = _owner(endpoint)
    free = f"/{'ip4' if endpoint.family == socket.AF_INET else 'ip6'}/{endpoint.host}/tcp"
    other = endpoint.port + 1 if endpoint.port < 65535 else endpoint.port - 1
    return UserError(
        f"{kind} port {endpoint.port} is taken by {owner}",
        (*looks, f"listen on another port: --listen {free}/{other}, or on any: --listen {free}/0"),
    )


def _owner(endpoint: _Endpoint) -> tuple[str, tuple[str, ...]]:
    """The program that listens there, and what can be done about it."""
    pid = _listening_process(endpoint)
    if pid is None:
        return "another program", (f"see which one: sudo ss -lntup 'sport = :{endpoint.port}'",)
    try:
        process = psutil.Process(pid)
        home = _home_of_p2pd(process.cmdline())
        if home is None:
            return f"{one_line(process.name(), 40)} (process {pid})", ("end that program",)
        parent = process.ppid()
    except psutil.Error:
        return f"process {pid}", ("end that program",)
    option = f"--home {shlex.quote(one_line(str(home)))}"
    looks = (
        f"look at that daemon: p2p-dtfm status {option}",
        f"end it: p2p-dtfm leave {option}",
    )
    return f"the daemon of {home} (process {parent})", looks


def _listening_process(endpoint: _Endpoint) -> int | None:
    kind = "tcp" if endpoint.kind == socket.SOCK_STREAM else "udp"
    try:
        sockets = psutil.net_connections(kind)
    except (psutil.Error, OSError):
        return None
    for found in sockets:
        listens = kind == "udp" or found.status == psutil.CONN_LISTEN
        if listens and found.laddr and found.laddr.port == endpoint.port and found.pid:
            return int(found.pid)
    return None


def _home_of_p2pd(command: list[str]) -> Path | None:
    """The home whose identity a p2pd of ours was given."""
    if not command or not command[0].endswith("p2pd"):
        return None
    for argument in command[1:]:
        if argument.startswith("-id="):
            return Path(argument.removeprefix("-id=")).parent
    return None
