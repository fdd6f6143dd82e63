"""Whether a daemon can have the addresses that it is to listen on."""

import errno
import socket
from collections.abc import Iterator, Sequence

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.daemon.peers.checks.check import Check, Grade
from p2p_dtfm.net.contacts.addresses import check_listen_address, host_and_port

LAST_PORT = 65_535


def check_ports(
    listen: Sequence[str], daemon_runs: bool, takes_lines: bool = False
) -> Iterator[Check]:
    """Check each address to listen on. `takes_lines`: the port above each is wanted too, for direct
    lines."""
    for address in listen:
        try:
            host, port = host_and_port(check_listen_address(address))
        except UserError as error:
            yield Check("port", Grade.FAILED, error.cause, error.fixes[0])
            continue
        if port == 0:
            fix = "to forward a port on a router, or to open one, choose it: " + address.replace(
                "/tcp/0", "/tcp/31330"
            )
            yield Check("port", Grade.OK, f"{address}: a free one is taken at each start", fix)
            continue
        fault = _fault(host, port)
        if fault is not None and not (daemon_runs and fault.errno == errno.EADDRINUSE):
            cause = fault.strerror or str(fault)
            yield Check("port", Grade.FAILED, f"{address}: {cause}", _fix(fault, host, port))
            continue
        by_whom = "in use, by the daemon that runs" if fault is not None else "free"
        yield (
            _with_lines(address, by_whom, daemon_runs)
            if takes_lines
            else Check("port", Grade.OK, f"{address}: {by_whom}")
        )


def _with_lines(address: str, by_whom: str, daemon_runs: bool) -> Check:
    """The finding for a port and the one above it."""
    host, port = host_and_port(address)
    above = port + 1
    fault = _fault(host, above) if above <= LAST_PORT else OSError("there is none")
    cause = "" if fault is None else fault.strerror or str(fault)
    if not cause or daemon_runs:
        found = f"{address}: {by_whom}; so is {above}, for direct lines"
        return Check("port", Grade.OK, found)
    found = (
        f"{address}: {by_whom}; {above}, where direct lines come in, is not ({cause}): any other "
        "port would be taken for them, which no router forwards"
    )
    fix = f"end the program that uses it (ss -tlnp sport = :{above}), or choose another port"
    return Check("port", Grade.WARNING, found, fix)


def _fix(fault: OSError, host: str, port: int) -> str:
    if fault.errno == errno.EACCES:
        return "choose a port from 1024 on: those below are for root"
    if fault.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine: /ip4/0.0.0.0/tcp/{port} always is"
    return f"end the program that uses it (ss -tlnp sport = :{port}), or choose another port"


def _fault(host: str, port: int) -> OSError | None:
    """Why nobody could listen there; None if somebody could."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except OSError as error:
        return error
    return None


def free_to_listen(listen: Sequence[str]) -> list[str]:
    """The daemon's addresses, so that forwarded ports are tried. Any port stands in for one that is
    taken."""
    return [
        address if _fault(*host_and_port(address)) is None else _any_port(address)
        for address in listen
        if next(check_ports([address], True)).verdict is Grade.OK
    ]


def _any_port(address: str) -> str:
    parts = address.split("/")
    parts[4] = "0"
    return "/".join(parts)
