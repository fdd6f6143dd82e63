"""Direct lines to those members that can be called, and from them.

A member that wants a line shows its card over the control channel, where libp2p says whose it is.
It gets the other's card, and from then on each side's TLS lets the other in. The caller uses the
host at which libp2p has a direct connection to the member, and no other, so nobody is made to call
a third party. Where no line is answered, it is tried again seldom, and libp2p carries the lanes.

A host whose line is limited, or emulated, has direct lines for calls alone. The control plane holds
calls to those limits whichever way they go. Lanes of such a host keep to libp2p's streams, which
are held to the limits.
"""

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.net.contacts.addresses import far_end, is_loopback
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.direct.call_lines import CallLines
from p2p_dtfm.net.direct.card import read_card
from p2p_dtfm.net.direct.handshake import FOR_CALLS, FOR_LANES, call_out, shake_hands
from p2p_dtfm.net.direct.line import DirectLine
from p2p_dtfm.net.direct.reception import HANDSHAKE_S, Reception, prepare
from p2p_dtfm.net.direct.sealed import SealedSocket
from p2p_dtfm.net.direct.trust import Trust
from p2p_dtfm.net.errors import Unreachable, one_line
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.ports import now

LINES_LIMIT = 256
"""Each line has a thread and a few descriptors."""
LINES_FROM_ONE_LIMIT = 32
CALL_S = 3.0
STALL_S = 60.0
FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 900.0
AFTER_A_BREAK_S = 5.0
PEERS_REMEMBERED = 4096

Made = TypeVar("Made")
log = logging.getLogger(__name__)


@dataclass
class _Tries:
    """How calling a peer has gone."""

    works: bool = False
    outcomes: int = 0
    failures: int = 0
    not_before_s: float = 0.0

    def failed(self, outcomes_before: int) -> None:
        """Note a failed call that began after `outcomes_before` outcomes. Several lanes call at
        once: what another call has found meanwhile holds for this one too, and counts once."""
        if outcomes_before != self.outcomes:
            return
        pause_s = min(FIRST_PAUSE_S * 2**self.failures, LONGEST_PAUSE_S)
        self.works, self.outcomes = False, self.outcomes + 1
        self.failures = min(self.failures + 1, 16)
        self.not_before_s = now.monotonic_s() + pause_s

    def succeeded(self) -> None:
        self.works, self.outcomes = True, self.outcomes + 1
        self.failures, self.not_before_s = 0, 0.0


class DirectLines:
    """All direct lines of one run. `await ready(accept)` before others can call."""

    def __init__(
        self, host: HostPort, run_digest: str, listen: Sequence[str], stall_s: float = STALL_S
    ) -> None:
        """`listen`: multiaddrs, as libp2p's. Lines are taken at the next higher port, or at any
        other."""
        self._stall_s = stall_s
        self._host = host
        self._run_digest = run_digest
        self._listen = listen
        self._trust = Trust(host.identity, run_digest)
        self._planes = {
            purpose: ControlPlane(host, partial(self._show, purpose), name=name)
            for purpose, name in ((FOR_LANES, "lines"), (FOR_CALLS, "call-lines"))
        }
        self._reception: Reception | None = None
        self._tries: dict[bytes, dict[str, _Tries]] = {purpose: {} for purpose in self._planes}
        self._lines: dict[DirectLine, str] = {}
        self._come: set[DirectLine] = set()
        """The lines among `_lines` that others have opened."""
        self._accept: Callable[[str, DirectLine], None] = lambda peer_id, line: line.close()
        self._calls: CallLines | None = None
        self.port = 0

    def carry_calls(self, control: ControlPlane) -> None:
        """Let lines carry the calls of a plane, too, to peers that are called often."""

        def begin(sender: str, request: bytes) -> "bytes | asyncio.Task[bytes]":
            self._host.calling.met(sender)
            return control.begin(sender, request)

        self._calls = control.way = CallLines(self, begin, self._host.door.is_near)

    async def ready(self, accept: Callable[[str, DirectLine], None]) -> None:
        """Listen, and answer. `accept(peer_id, line)` is called for each line that others open."""
        self._accept = accept
        self._reception = Reception(self._trust, self._welcome, self._stall_s)
        hosts, wanted_port = _where_to_listen(self._listen)
        self.port = self._reception.listen(hosts, wanted_port)
        self._trust.listens_at(self.port)
        for plane in self._planes.values():
            await plane.ready()

    def _are_allowed(self, purpose: bytes) -> bool:
        is_held_to = purpose == FOR_CALLS or self._host.shaper is None
        return is_held_to and len(self._lines) < LINES_LIMIT

    def wants(self, peer_id: str) -> bool:
        """Whether it is worth a try now to call a peer for lanes."""
        return self._wants(peer_id, FOR_LANES)

    def wants_calls(self, peer_id: str) -> bool:
        """Whether it is worth a try now to call a peer for calls."""
        return self._wants(peer_id, FOR_CALLS)

    def _wants(self, peer_id: str, purpose: bytes) -> bool:
        tries = self._tries[purpose].get(peer_id)
        due = tries is None or now.monotonic_s() >= tries.not_before_s
        return due and self._are_allowed(purpose)

    def works(self, peer_id: str) -> bool:
        """Whether the last call for a lane got through, and no line to the peer broke since."""
        tries = self._tries[FOR_LANES].get(peer_id)
        return tries is not None and tries.works and self._are_allowed(FOR_LANES)

    async def open(self, peer_id: str) -> DirectLine:
        """A line to a peer. Raises `Unreachable`."""
        return await self._connected(peer_id, FOR_LANES, partial(self._line, peer_id))

    async def connection(self, peer_id: str) -> SealedSocket:
        """A connection for calls to a peer. Raises `Unreachable`."""
        return await self._connected(peer_id, FOR_CALLS, lambda connection: connection)

    async def _connected(
        self, peer_id: str, purpose: bytes, made_of: Callable[[SealedSocket], Made]
    ) -> Made:
        tries = self._tries[purpose].get(peer_id) or _Tries()
        put_newest(self._tries[purpose], peer_id, tries, PEERS_REMEMBERED)
        outcomes_before = tries.outcomes
        try:
            made = made_of(await self._open(peer_id, purpose))
        except asyncio.CancelledError:  # the caller waits no longer
            tries.failed(outcomes_before)
            raise
        except Exception as error:
            tries.failed(outcomes_before)
            if not isinstance(error, Unreachable | PeerFault | OSError):
                log.warning("bug while making a direct line to %s", peer_id, exc_info=error)
            cause = error.cause if isinstance(error, Unreachable | PeerFault) else str(error)
            cause = one_line(cause or repr(error))
            raise Unreachable(peer_id, f"no direct line: {cause}") from error
        if not tries.works:
            what = "lines" if purpose == FOR_LANES else "lines for calls"
            log.info("direct %s to %s", what, peer_id)
        tries.succeeded()
        return made

    def broke(self, peer_id: str) -> None:
        """Note that an open line has ended. libp2p carries the lanes for a moment, then a line is
        tried again."""
        tries = self._tries[FOR_LANES].get(peer_id)
        if tries is not None:
            tries.works = False
            tries.not_before_s = max(tries.not_before_s, now.monotonic_s() + AFTER_A_BREAK_S)

    def let_nobody_in(self, peer_id: str) -> None:
        """Note that an open line's other end let no lane in, as where it has no thread left. The
        next line is tried no sooner than where nobody answers. Lanes that came to that end at once
        count once: after the first of them no line is wanted."""
        tries = self._tries[FOR_LANES].get(peer_id)
        if tries is not None and now.monotonic_s() >= tries.not_before_s:
            tries.failed(tries.outcomes)

    async def close(self) -> None:
        if self._reception is not None:
            self._reception.close()
        if self._calls is not None:
            self._calls.close()
        for plane in self._planes.values():
            await plane.close()
        lines = list(self._lines)
        for line in lines:
            line.close()
        await asyncio.gather(*(line.closed(CALL_S) for line in lines))

    # who is who ----------------------------------------------------------------------------------

    async def _show(self, purpose: bytes, sender: str, body: bytes) -> bytes:
        """Take the card that a peer shows, and answer with ours. Raises `PeerFault`."""
        if not self._are_allowed(purpose):
            raise PeerFault("no direct lines here", sender)
        self._trust.add(sender, read_card(body, sender, self._run_digest, now.wall_s()))
        self._part_from_strangers()
        return encode(self._trust.own().card)

    async def _open(self, peer_id: str, purpose: bytes) -> SealedSocket:
        if not self._are_allowed(purpose):
            raise Unreachable(peer_id, "no direct lines from here")
        address = await self._host.direct_address(peer_id)
        if address is None:
            raise Unreachable(peer_id, "it is only reached through a relay")
        if is_loopback(address) and not self._host.is_only_local:
            raise Unreachable(peer_id, "its connection was joined to ours here")
        if (end := far_end(address)) is None:
            raise Unreachable(peer_id, "its host has no plain number")
        body = await self._planes[purpose].call(peer_id, encode(self._trust.own().card), CALL_S)
        card = read_card(body, peer_id, self._run_digest, now.wall_s())
        if not card.port:
            raise Unreachable(peer_id, "it takes none")
        self._trust.add(peer_id, card)
        return await self._dial(peer_id, (end[0], card.port), purpose)

    async def _dial(self, peer_id: str, where: tuple[str, int], purpose: bytes) -> SealedSocket:
        host, port = where
        raw = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        connection: socket.socket = raw
        try:
            raw.setblocking(False)
            prepare(raw, self._stall_s)
            async with asyncio.timeout(CALL_S):
                await asyncio.get_running_loop().sock_connect(raw, (host, port))
            secured = connection = self._trust.wrap(raw, is_server=False)
            async with asyncio.timeout(HANDSHAKE_S):
                await shake_hands(secured)
                if self._trust.owner_of(secured) != peer_id:
                    raise Unreachable(peer_id, "another peer answered")
                return await call_out(secured, purpose)
        except TimeoutError as error:
            connection.close()
            raise Unreachable(peer_id, f"nobody answers at port {port}") from error
        except BaseException:
            connection.close()
            raise

    def _line(self, peer_id: str, connection: SealedSocket) -> DirectLine:
        def ended() -> None:
            self._lines.pop(line, None)
            self._come.discard(line)

        try:
            line = DirectLine(connection, self._stall_s, ended)
        except BaseException:  # no thread, or no descriptor, is left
            connection.close()
            raise
        self._lines[line] = peer_id
        return line

    def _welcome(self, peer_id: str, connection: SealedSocket, purpose: bytes) -> None:
        """Take a connection that TLS let in, if its peer is still near. TLS lets in any peer that
        was near when it showed its card."""
        self._part_from_strangers()
        count = sum(1 for whose in self._lines.values() if whose == peer_id)
        is_near = self._host.door.is_near(peer_id)
        if not is_near or count >= LINES_FROM_ONE_LIMIT or not self._are_allowed(purpose):
            connection.close()
        elif purpose == FOR_LANES:
            self._take(peer_id, connection)
        elif self._calls is not None:
            self._calls.take(peer_id, connection)
        else:
            connection.close()

    def _take(self, peer_id: str, connection: SealedSocket) -> None:
        line = self._line(peer_id, connection)
        self._come.add(line)
        self._accept(peer_id, line)

    def _part_from_strangers(self) -> None:
        """Drop the certificates and lines of peers that may send tensors no more. Their
        certificates then no longer count here, and their threads end. This is done whenever a peer
        comes: until then nobody needs the room."""
        is_near = self._host.door.is_near
        self._trust.keep(is_near)
        for line in [line for line in self._come if not is_near(self._lines[line])]:
            line.close()


def _where_to_listen(addresses: Sequence[str]) -> tuple[tuple[str, ...], int]:
    """Hosts of the TCP addresses, and the port above the first one's; 0 for any port."""
    hosts: dict[str, None] = {}
    wanted_port = 0
    for address in addresses:
        parts = address.strip("/").split("/")
        if parts[0] not in ("ip4", "ip6") or parts[2] != "tcp":
            continue
        hosts.setdefault(parts[1])
        port = int(parts[3])
        wanted_port = wanted_port or (port + 1 if 0 < port < 65535 else 0)
    return tuple(hosts), wanted_port
