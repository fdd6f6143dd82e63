"""Addresses as people paste them: /ip4/203.0.113.7/tcp/4001/p2p/12D3Koo..."""

import functools
import ipaddress
import re
from collections.abc import Iterable

import base58

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.invited.line import PREFIX
from p2p_dtfm.net.contacts.identity import is_peer_id
from p2p_dtfm.net.hivemind_parts import Multiaddr

EXAMPLE = "/ip4/203.0.113.7/tcp/4001/p2p/12D3KooW..."
LISTEN_EXAMPLE = "/ip4/0.0.0.0/tcp/31330"
ANNOUNCE_EXAMPLE = "/ip4/203.0.113.7/tcp/31330"
_ADDRESS_LIMIT_CHARACTERS = 512
_HOSTS = ("ip4", "ip6", "dns", "dns4", "dns6")
_PORT_DIGITS = 5
_LABEL_BYTES = 63
"""The most bytes of one part of a name: no resolver takes more."""
_FLAGS = ("quic", "quic-v1", "ws", "wss", "p2p-circuit")
_P2P_CODE = bytes((0xA5, 0x03))  # multicodec 421 as a varint


class _Malformed(Exception):
    """What is wrong with an address, and how to mend just that, if the right form alone does not
    say so."""

    def __init__(self, cause: str, fix: str = "") -> None:
        self.cause = cause
        self.fix = fix
        super().__init__(cause)


def peer_ids_of(addresses: Iterable[str]) -> list[str]:
    """The ids of the peers at these addresses, each once, in their order. Raises `UserError`."""
    return list(by_peer(addresses))


def by_peer(addresses: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """All addresses of each peer, in their order. Raises `UserError`."""
    found: dict[str, tuple[str, ...]] = {}
    for address in addresses:
        peer_id, where = parse_address(address)
        found[peer_id] = (*found.get(peer_id, ()), whole(where, peer_id))
    return found


def parse_address(text: str) -> tuple[str, str]:
    """(peer id, the address without its last /p2p/ID). Raises `UserError` saying what is wrong."""
    try:
        return _peer_and_rest(text.strip())
    except _Malformed as error:
        fixes = [error.fix] if error.fix else []
        if not (host_and_port := _host_and_port_of(text)):
            fixes.append(f"the right form is {EXAMPLE}")
        else:
            fixes.append(f"write it as {host_and_port}/p2p/12D3KooW...")
        fixes.append("on the other machine, p2p-dtfm status shows the whole address")
        raise _refusal(text, error.cause, fixes) from error


def _refusal(text: str, cause: str, fixes: list[str]) -> UserError:
    shown = text if len(text) <= _ADDRESS_LIMIT_CHARACTERS else text[:60] + "…"
    return UserError(f"malformed address {shown!r}: {cause}", tuple(fixes))


def _peer_and_rest(address: str) -> tuple[str, str]:
    parts = _parts(address)
    if any(rest.lstrip().startswith("/") for rest in re.split(r"[,;\s]", address)[1:]):
        raise _Malformed("it is several in one", "give --initial-peers once for each of them")
    if len(parts) < 2 or parts[-2] != "p2p":
        raise _Malformed("it does not end in /p2p/ and the id of the other peer")
    peer_id = parts[-1]
    if not is_peer_id(peer_id):
        raise _Malformed(
            f"{peer_id!r} is no peer id: that is 52 characters that begin with 12D3Koo",
            "copy the address whole: its end seems to be cut off or changed",
        )
    rest = parts[:-2]
    if not rest:
        raise _Malformed("it names a peer but no host and port")
    _check_transport(rest)
    return peer_id, "/" + "/".join(rest)


def is_address(text: str) -> bool:
    """Whether `parse_address` takes `text`."""
    try:
        _peer_and_rest(text.strip())
    except _Malformed:
        return False
    return True


def why_uncallable(address: str) -> tuple[str, str]:
    """Cause and fix for a well-formed address that libp2p does not call."""
    kind, host = address.split("/")[1:3]
    if host in ("0.0.0.0", "::"):
        cause = f"{host} is what a daemon listens on, and no machine's own address"
        return cause, f"put the other machine's address in the place of {host}"
    if kind.startswith("dns"):
        return f"the name {host} is not known here", f"see whether {host} is spelt right"
    if kind == "ip6" and ipaddress.ip_address(host).is_link_local:
        cause = "a link-local address holds on one cable only, and does not say on which"
        return cause, "use another address of that machine"
    return "it cannot be called from here", ""


def check_listen_address(text: str) -> str:
    """An address to listen on, such as /ip4/0.0.0.0/tcp/4001. Raises `UserError`."""
    return _without_peer(text, "to listen on", LISTEN_EXAMPLE, "; port 0 takes any free one")


def check_announced_address(text: str) -> str:
    """Where others reach this peer, such as /ip4/203.0.113.7/tcp/4001. Raises `UserError`."""
    address = _without_peer(text, "to tell others", ANNOUNCE_EXAMPLE)
    host, port = host_and_port(address)
    if port == 0 or host in ("0.0.0.0", "::"):
        cause = "others cannot call port 0" if port == 0 else f"others cannot call {host}"
        fix = f"give the address of your router or machine, as in {ANNOUNCE_EXAMPLE}"
        raise _refusal(text, cause, [fix])
    return address


def _without_peer(text: str, purpose: str, example: str, hint: str = "") -> str:
    try:
        parts = _parts(text.strip())
        if "p2p" in parts:
            raise _Malformed(
                f"an address {purpose} has no /p2p/ part", "leave out /p2p/ and what follows"
            )
        _check_transport(parts)
    except _Malformed as error:
        right = _host_and_port_of(text) or example
        fixes = [error.fix] if error.fix else []
        fixes.append(f"an address {purpose} looks like {right}{hint}")
        raise _refusal(text, error.cause, fixes) from error
    return "/" + "/".join(parts)


def _parts(text: str) -> list[str]:
    if not text:
        raise _Malformed("it is empty")
    if PREFIX in text and not text.startswith("/"):
        raise _Malformed("it is an invitation", "give it as --invite LINE")
    if len(text) > _ADDRESS_LIMIT_CHARACTERS:
        raise _Malformed(f"it has {len(text)} characters")
    if not text.startswith("/"):
        raise _Malformed("it does not begin with /")
    return text.strip("/").split("/")


def _host_and_port_of(text: str) -> str:
    """The multiaddress that a user may have meant by HOST:PORT; empty if it is none."""
    host, _, port = text.strip().rpartition(":")
    if not host or "/" in host or not (port.isascii() and port.isdigit()):
        return ""
    try:
        kind = f"ip{ipaddress.ip_address(host.strip('[]')).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host.strip('[]')}/tcp/{port}"


def _check_transport(parts: list[str]) -> None:
    position = 0
    names: list[str] = []
    while position < len(parts):
        name = parts[position]
        names.append(name)
        if name in _FLAGS:
            position += 1
            continue
        if position + 1 == len(parts):
            known = name in (*_HOSTS, "tcp", "udp", "p2p")
            cause = f"nothing follows /{name}" if known else f"{name!r} is unknown"
            raise _Malformed(cause)
        _check_part(name, parts[position + 1])
        position += 2
    if not names or names[0] not in _HOSTS or len(names) < 2 or names[1] not in ("tcp", "udp"):
        raise _Malformed("a host must be followed by /tcp/ and a port")
    if names[1] == "udp" and not {"quic", "quic-v1"} & set(names):
        raise _Malformed("over UDP libp2p speaks QUIC only", "write /tcp/ in place of /udp/")
    try:
        WireAddress("/".join(parts)).to_bytes()
    except Exception as error:  # another library may raise anything: its word is the last one
        raise _Malformed("libp2p cannot read it") from error


def _check_part(name: str, value: str) -> None:
    if name in ("tcp", "udp"):
        is_digits = len(value) <= _PORT_DIGITS and value.isascii() and value.isdigit()
        if not (is_digits and int(value) <= 65535):
            raise _Malformed(f"{value!r} is no port: that is a number up to 65535")
    elif name in ("ip4", "ip6"):
        if not is_number(value) or ipaddress.ip_address(value).version != int(name[2]):
            raise _Malformed(f"{value!r} is no IPv{name[2]} address")
    elif name == "p2p":
        if not is_peer_id(value):
            raise _Malformed(f"{value!r} is no peer id")
    elif name in _HOSTS:
        _check_name(name, value)
    else:
        raise _Malformed(f"{name!r} is unknown")


def _check_name(kind: str, name: str) -> None:
    if not name:
        raise _Malformed(f"nothing follows /{kind}")
    labels = name.encode("utf-8", "replace").removesuffix(b".").split(b".")
    fit = all(0 < len(label) <= _LABEL_BYTES for label in labels)
    if not fit or not name.isprintable() or " " in name:
        raise _Malformed(f"{name!r} is no name of a machine")


def is_loopback(address: str) -> bool:
    """Whether the host of a valid multiaddr is this machine's loopback."""
    parts = address.strip("/").split("/")
    try:
        return ipaddress.ip_address(parts[1]).is_loopback
    except (ValueError, IndexError):
        return False


def is_relayed(address: str) -> bool:
    """Whether an address leads through a relay."""
    return "/p2p-circuit" in address


class WireAddress:
    """A multiaddr in the bytes that p2pd wants. `to_bytes` is for one that was checked.

    hivemind's codec writes the base58 text of a /p2p/ part where its raw bytes belong, so those
    parts are written here.
    """

    def __init__(self, address: str) -> None:
        self._address = address

    def to_bytes(self) -> bytes:
        encoded = b""
        rest: list[str] = []
        parts = iter(self._address.strip("/").split("/"))
        for part in parts:
            if part == "p2p":
                encoded += _plain_bytes(rest) + _peer_bytes(next(parts))
                rest = []
            else:
                rest.append(part)
        return encoded + _plain_bytes(rest)


def _plain_bytes(parts: list[str]) -> bytes:
    return Multiaddr("/" + "/".join(parts)).to_bytes() if parts else b""


def _peer_bytes(peer_id: str) -> bytes:
    raw = base58.b58decode(peer_id)
    return _P2P_CODE + bytes((len(raw),)) + raw


def is_way(address: str) -> bool:
    """Whether a peer could be called at an address that does not end in its id. All that others say
    about where a peer is comes through here, and libp2p is given nothing else."""
    return len(address) <= _ADDRESS_LIMIT_CHARACTERS and _is_way(address)


@functools.lru_cache(maxsize=4096)
def _is_way(address: str) -> bool:
    try:
        _check_transport(_parts(address))
    except _Malformed:
        return False
    return True


def usable_addresses(addresses: Iterable[str]) -> list[WireAddress]:
    """The well-formed ones of the addresses that a peer claims for itself."""
    return [WireAddress(address) for address in addresses if is_way(address)]


def ways_to(peer_id: str, addresses: Iterable[str]) -> tuple[str, ...]:
    """The addresses at which a peer could be called, unchanged. Each may end in the peer's id."""
    suffix = f"/p2p/{peer_id}"
    return tuple(address for address in addresses if is_way(address.removesuffix(suffix)))


def whole(address: str, peer_id: str) -> str:
    """The address with the id of its peer at its end."""
    suffix = f"/p2p/{peer_id}"
    return address if address.endswith(suffix) else address + suffix


def far_end(address: str) -> tuple[str, int] | None:
    """Host and port of a connection that p2pd has. None for a relayed one, or one of another form,
    such as with the zone of a link-local number."""
    if is_relayed(address):
        return None
    try:
        return host_and_port(address)
    except (ValueError, IndexError):
        return None


def is_from_elsewhere(address: str) -> bool:
    """Whether an address may be called from outside of this network, or a connection comes from
    there."""
    end = far_end(address)
    return is_relayed(address) or (end is not None and is_public(end[0]))


def host_and_port(address: str) -> tuple[str, int]:
    """The host (a number or a name) and the port of a valid multiaddr."""
    parts = address.strip("/").split("/")
    return parts[1], int(parts[3])


def tcp_address(host: str, port: int) -> str:
    """The multiaddr of a TCP port at an IP number."""
    return f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}"


def one_spelling(host: str) -> str:
    """The same text for all ways to write a host. IPv6 writes an IPv4 number as one of its own, and
    names are alike in capitals, and with the dot of the root."""
    try:
        number = ipaddress.ip_address(host)
    except ValueError:
        return host.lower().removesuffix(".")
    inner = number.ipv4_mapped if isinstance(number, ipaddress.IPv6Address) else None
    return str(inner or number)


def is_number(host: str) -> bool:
    """Whether a host is an IP number that holds without a zone."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return "%" not in host


def is_public(host: str) -> bool:
    """Whether a host is a number that is valid everywhere. A name counts as public."""
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return True
