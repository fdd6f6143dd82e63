"""Members of a run on the same network, found by a question to all and answers to the asker.

    question  "p2p-dtfm?" 1, nonce (16 bytes), mark of the run (16), the asker's peer id, padding
    answer    "p2p-dtfm!" 1, the same nonce, another mark (16), flags, TCP port (2), peer id

The marks are hashes of the run's digest keyed with the nonce. A listener that does not know the run
learns from them neither which run it is nor whether two questions are about one. Besides the marks
there are the peer id, and the port that everybody on the network can find. An answer is a hint: the
caller proves the peer id when it dials, and dials only the host that the answer came from.

Questions go to the machines of the same network, and no router passes them on. Hosts that listen on
loopback only ask and answer on loopback. An answer is shorter than its question, goes to neighbours
only, and a few are given in a second.
"""

import asyncio
import contextlib
import hashlib
import ipaddress
import logging
import math
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import psutil

from p2p_dtfm.net.contacts.identity import is_peer_id
from p2p_dtfm.ports import now

GROUP = "239.255.77.13"
"""An address of the block that stays within an organisation (RFC 2365)."""
PORT = 31329
QUESTION = b"p2p-dtfm?\x01"
ANSWER = b"p2p-dtfm!\x01"
NONCE_BYTES = MARK_BYTES = 16
QUESTION_BYTES = 160
DATAGRAM_LIMIT_BYTES = 512
ASK_AT_S = (0.0, 0.3, 0.8)
"""Seconds at which a question is sent again, because a datagram may be lost."""
LISTEN_S = 1.5
ANSWERS_LIMIT = 16
ANSWERS_PER_S = 20
INTERFACES_LIMIT = 8
LOOK_AGAIN_S = 5.0
"""A question from another network makes this peer look at its own networks again no more often."""
_HEAD = struct.Struct("!BH")
_KNOWS_ASKER = 1

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Neighbour:
    """A peer that has answered."""

    peer_id: str
    address: str
    """A multiaddr without the peer id."""
    knows_asker: bool
    """Whether the neighbour says that it has met this peer before."""


def make_question(run_digest: str, peer_id: str, nonce: bytes) -> bytes:
    body = QUESTION + nonce + _mark(run_digest, nonce, b"question") + peer_id.encode()
    return body.ljust(QUESTION_BYTES, b"\0")


def read_question(datagram: bytes, run_digest: str) -> tuple[bytes, str] | None:
    """(nonce, peer id) of a question about this very run."""
    if len(datagram) != QUESTION_BYTES or not datagram.startswith(QUESTION):
        return None
    nonce, mark, rest = _split(datagram[len(QUESTION) :])
    peer_id = rest.rstrip(b"\0").decode("ascii", "replace")
    if mark != _mark(run_digest, nonce, b"question") or not is_peer_id(peer_id):
        return None
    return nonce, peer_id


def make_answer(run_digest: str, peer_id: str, port: int, nonce: bytes, knows_asker: bool) -> bytes:
    head = _HEAD.pack(_KNOWS_ASKER if knows_asker else 0, port)
    return ANSWER + nonce + _mark(run_digest, nonce, b"answer") + head + peer_id.encode()


def read_answer(datagram: bytes, run_digest: str, nonce: bytes, host: str) -> Neighbour | None:
    """An answer to the question of this nonce that came from `host`; None for anything else."""
    least = len(ANSWER) + NONCE_BYTES + MARK_BYTES + _HEAD.size
    if not least < len(datagram) <= QUESTION_BYTES or not datagram.startswith(ANSWER):
        return None
    answered, mark, rest = _split(datagram[len(ANSWER) :])
    if answered != nonce or mark != _mark(run_digest, nonce, b"answer"):
        return None
    flags, port = _HEAD.unpack_from(rest)
    peer_id = rest[_HEAD.size :].decode("ascii", "replace")
    if not is_peer_id(peer_id) or not port:
        return None
    return Neighbour(peer_id, f"/ip4/{host}/tcp/{port}", bool(flags & _KNOWS_ASKER))


def _split(body: bytes) -> tuple[bytes, bytes, bytes]:
    end = NONCE_BYTES + MARK_BYTES
    return body[:NONCE_BYTES], body[NONCE_BYTES:end], body[end:]


def _mark(run_digest: str, nonce: bytes, what: bytes) -> bytes:
    found = hashlib.blake2b(run_digest.encode(), key=nonce, person=what, digest_size=MARK_BYTES)
    return found.digest()


class Nearby:
    """One peer's questions, and its answers while it trains a run."""

    def __init__(self, peer_id: str, only_loopback: bool) -> None:
        self._peer_id = peer_id
        self._only_loopback = only_loopback
        self._interfaces: list[ipaddress.IPv4Interface] = []
        self._listener: socket.socket | None = None
        self._transport: asyncio.DatagramTransport | None = None
        self._answered_s: list[float] = []
        self._looked_s = -math.inf
        self.look_around()

    async def answer(
        self,
        run_digest: str,
        port: int,
        knows: Callable[[str], bool],
        *,
        only_known: bool = False,
    ) -> None:
        """Answer questions about this run from now on, and no others. `only_known`: unknown askers
        get no answer, as while this peer does not train itself. Where the system does not allow
        listening, others do not find this peer here, which is no reason to fail."""
        self.close()
        self.look_around()

        def on_datagram(datagram: bytes, source: tuple[str, int]) -> None:
            question = read_question(datagram, run_digest)
            if question is None or not self._is_near_now(source[0]) or not self._may_answer():
                return
            nonce, asker = question
            is_known = knows(asker)
            if asker != self._peer_id and self._transport and (is_known or not only_known):
                reply = make_answer(run_digest, self._peer_id, port, nonce, is_known)
                self._transport.sendto(reply, source)

        try:
            listener = _listening_socket()
            _hear(listener, self._interfaces)
            self._listener = listener
            self._transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Datagrams(on_datagram), sock=listener
            )
        except OSError as error:
            log.info("does not listen for questions on the local network: %s", error.strerror)

    async def ask(self, run_digest: str, on_answer: Callable[[Neighbour], None]) -> None:
        """Ask all neighbours, and hear of each that answers, once, within `LISTEN_S`."""
        self.look_around()
        nonce = secrets.token_bytes(NONCE_BYTES)
        heard: set[Neighbour] = set()

        def on_datagram(datagram: bytes, source: tuple[str, int]) -> None:
            if not self._is_near(source[0]) or len(heard) >= ANSWERS_LIMIT:
                return
            found = read_answer(datagram, run_digest, nonce, source[0])
            if found is not None and found not in heard and found.peer_id != self._peer_id:
                heard.add(found)
                on_answer(found)

        try:
            transport, asking = await self._asking_socket(on_datagram)
        except OSError as error:
            log.debug("cannot ask on the local network: %s", error)
            return
        question = make_question(run_digest, self._peer_id, nonce)
        begin_s = now.monotonic_s()
        try:
            for at_s in ASK_AT_S:
                await asyncio.sleep(max(0.0, begin_s + at_s - now.monotonic_s()))
                self._send(asking, question)
            await asyncio.sleep(max(0.0, begin_s + LISTEN_S - now.monotonic_s()))
        finally:
            transport.close()

    def look_around(self) -> None:
        """Look at this machine's networks again: when it is carried elsewhere, it comes to
        others."""
        self._looked_s = now.monotonic_s()
        try:
            found = _interfaces(self._only_loopback)
        except (OSError, ValueError) as error:
            log.debug("local network: %s", error)
            return
        new = [interface for interface in found if interface not in self._interfaces]
        self._interfaces = found
        if self._listener is not None and self._transport is not None:
            _hear(self._listener, new)

    async def _asking_socket(
        self, on_datagram: Callable[[bytes, tuple[str, int]], None]
    ) -> tuple[asyncio.DatagramTransport, socket.socket]:
        """A socket of its own. Answers to a port that several daemons share would reach one of
        them."""
        asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            asking.setblocking(False)
            asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 1)
            transport, _ = await asyncio.get_running_loop().create_datagram_endpoint(
                lambda: _Datagrams(on_datagram), sock=asking
            )
        except OSError:
            asking.close()
            raise
        return transport, asking

    def _send(self, asking: socket.socket, question: bytes) -> None:
        for interface in self._interfaces:
            own = socket.inet_aton(str(interface.ip))
            with contextlib.suppress(OSError):  # the interface is down, or its buffer full
                asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, own)
                asking.sendto(question, (GROUP, PORT))

    def _is_near(self, host: str) -> bool:
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return any(address in interface.network for interface in self._interfaces)

    def _is_near_now(self, host: str) -> bool:
        """Whether the host is near. Before it says no, it looks again: this machine may have come
        to another network."""
        if not self._is_near(host) and now.monotonic_s() - self._looked_s >= LOOK_AGAIN_S:
            self.look_around()
        return self._is_near(host)

    def _may_answer(self) -> bool:
        now_s = now.monotonic_s()
        self._answered_s = [at_s for at_s in self._answered_s if now_s - at_s < 1.0]
        if len(self._answered_s) >= ANSWERS_PER_S:
            return False
        self._answered_s.append(now_s)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._transport = self._listener = None


class _Datagrams(asyncio.DatagramProtocol):
    def __init__(self, on_datagram: Callable[[bytes, tuple[str, int]], None]) -> None:
        self._on_datagram = on_datagram

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        if len(data) <= DATAGRAM_LIMIT_BYTES:
            self._on_datagram(data, addr)

    def error_received(self, exc: Exception) -> None:
        log.debug("local network: %s", exc)


def _listening_socket() -> socket.socket:
    """A socket that all daemons of a machine share: each of them gets every question."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        listener.setblocking(False)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((GROUP, PORT))  # hears what is sent to the group, and nothing else
    except OSError:
        listener.close()
        raise
    return listener


def _hear(listener: socket.socket, interfaces: Sequence[ipaddress.IPv4Interface]) -> None:
    """Listen to the group on these networks."""
    for interface in interfaces:
        wanted = socket.inet_aton(GROUP) + socket.inet_aton(str(interface.ip))
        with contextlib.suppress(OSError):
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, wanted)


def _interfaces(only_loopback: bool) -> list[ipaddress.IPv4Interface]:
    """This machine's addresses and networks. Loopback alone, if so wanted or there is no other."""
    found = [
        ipaddress.IPv4Interface(f"{item.address}/{item.netmask or '255.255.255.255'}")
        for items in psutil.net_if_addrs().values()
        for item in items
        if item.family == socket.AF_INET
    ]
    local = [interface for interface in found if interface.is_loopback]
    others = [interface for interface in found if not interface.is_loopback]
    return (local if only_loopback else others or local)[:INTERFACES_LIMIT]
