"""How others reach this peer: they call it, or a relay passes them on, or they cannot.

It asks peers that it has called itself to call back. Where nobody can, it asks two of those peers
to be its relays, so that one may die, and looks for others when one has. With a peer that it meets
through a relay it tries for a direct connection. And it does all of that for others.
"""

import asyncio
import contextlib
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.records import Reachability
from p2p_dtfm.net.contacts.addresses import (
    far_end,
    host_and_port,
    is_from_elsewhere,
    is_loopback,
    is_public,
    is_relayed,
    parse_address,
    tcp_address,
    whole,
)
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.contacts.ports import port_listened_at
from p2p_dtfm.net.errors import P2PD_HAS_ENDED, Refused, Unreachable
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.nat.dial_back import CallBacks, SeenAddress
from p2p_dtfm.net.nat.punching import Punching
from p2p_dtfm.net.nat.relay import Relay, relayed_address, reserve
from p2p_dtfm.ports import now

RELAYS_WANTED = 2
ASKED_LIMIT = 3
LOOK_S = 3.0
"""How often this peer looks whether its relays are still there."""
RENEW_S = 20.0
"""How often a reservation is renewed. A relay restarted between two looks has forgotten it, and
does not say so."""
MISSES_LIMIT = 3
ASK_AGAIN_S = 60.0
UNANSWERED_AGAIN_S = 10.0
"""The pause where nobody answered. A peer that knows nothing of its way in, or has moved since,
takes no relay, and others may not reach it."""
ASK_WHO_IS_CERTAIN_S = 600.0
"""How often a peer that is called directly asks again. Routers forget what they forward."""
PUNCH_AGAIN_S = 600.0
PEERS_REMEMBERED = 1024
OWN_AGAIN_S = 1.0
OWN_PATIENCE_S = 60.0
USUAL_PORT, SECOND_PORT = 31330, 31340
"""Ports of a user that has chosen none. A router forwards each to one machine only."""

log = logging.getLogger("p2p_dtfm")


async def own_addresses(host: HostPort) -> tuple[str, ...]:
    """This peer's own addresses. Its p2pd may have no time to say, as where the machine swaps or
    all of it measures, so it is asked again.

    If p2pd says nothing for long, there are none, and others are told later
    (`daemon.node.background.presence`). Raises `Unreachable` once p2pd has ended.
    """
    end_s = now.monotonic_s() + OWN_PATIENCE_S
    while True:
        try:
            return await host.addresses()
        except Unreachable as error:
            if P2PD_HAS_ENDED in error.cause:
                raise
            log.debug("own addresses: %s", error)
            if now.monotonic_s() >= end_s:
                return ()
        await asyncio.sleep(OWN_AGAIN_S)


@dataclass(frozen=True)
class ReachabilityFinding:
    """How this peer is reached, as far as known, and how that was found."""

    reachability: Reachability
    reason: str
    public_host: str = ""
    """Where the world sees this peer, or its router."""
    public_port: int = 0

    def as_json(self) -> dict[str, object]:
        return {
            "reachability": self.reachability.value,
            "reason": self.reason,
            "public_host": self.public_host,
        }


@dataclass
class _Reservation:
    address: str
    renew_s: float
    misses: int = 0
    """Renewals in a row without an answer. A busy relay keeps the reservation all the same, for an
    hour."""

    @property
    def may_miss(self) -> bool:
        return self.misses + 1 < MISSES_LIMIT

    def missed(self) -> "_Reservation":
        return replace(self, misses=self.misses + 1)


class ReachabilityService:
    """One host's reachability. `await ready()`, then `find`. Then `keep` runs until the end."""

    def __init__(
        self,
        host: HostPort,
        relays: bool = True,
        listen: Sequence[str] = (),
        announce: Sequence[str] = (),
    ) -> None:
        """`listen`, `announce`: as the host was started with. Where the user announces addresses,
        none is added to them."""
        self._host = host
        self._listen, self._announce = tuple(listen), tuple(announce)
        self.finding = ReachabilityFinding(Reachability.UNKNOWN, "nobody was asked yet")
        self.changed = asyncio.Event()
        """Set when this peer's addresses have changed. The loop that tells others clears it."""
        self._reservations: dict[str, _Reservation] = {}
        self._unwilling: dict[str, float] = {}
        self._own_ends: frozenset[tuple[str, int]] = frozenset()
        """Hosts and ports that p2pd states."""
        self._ports: tuple[int, ...] = ()
        self._listen_port = 0
        self._way_in = ""
        """Where others get through to this peer from elsewhere, if p2pd does not know of it."""
        self._callbacks = CallBacks(host)
        self.relay = Relay(host, lambda: relays and self._is_open)
        self._punching = Punching(
            host, self._endpoint, lambda: self._is_open, lambda: self._listen_port
        )
        self._punched_s: dict[str, float] = {}
        self._asked_s = 0.0
        self._is_doubted = False
        """The finding is in doubt, because this machine has moved since."""
        self._vain_rounds = 0
        """Rounds in a row in which nobody got through."""

    async def ready(self) -> "ReachabilityService":
        """Serve others."""
        await self._note_ports()
        await self._callbacks.ready()
        await self._punching.ready()
        await self.relay.ready()
        return self

    async def _note_ports(self) -> None:
        """Note what p2pd states now. A router that starts again may forward another port."""
        stated = [it for it in await own_addresses(self._host) if it not in self._found]
        own = [end for at in stated if (end := far_end(at)) is not None]
        self._own_ends = frozenset(own)
        self._listen_port = port_listened_at(self._listen, self._announce, stated)
        self._ports = tuple(dict.fromkeys(port for _, port in own))

    @property
    def _found(self) -> tuple[str, ...]:
        return self._host.found_addresses

    @property
    def relays(self) -> tuple[str, ...]:
        """Peers that pass others on to this one."""
        return tuple(sorted(self._reservations))

    @property
    def is_behind_router(self) -> bool:
        """Whether nobody can call this peer."""
        return self.finding.reachability in (Reachability.RELAYED, Reachability.UNREACHABLE)

    @property
    def _is_open(self) -> bool:
        return not self.is_behind_router and not self._host.is_only_local

    def _endpoint(self) -> tuple[str, int] | None:
        finding = self.finding
        return (finding.public_host, finding.public_port) if finding.public_port else None

    async def find(self, initial_peers: Sequence[str]) -> ReachabilityFinding:
        """Ask some of the initial peers, which are connected. Take relays if nobody can call this
        peer."""
        asked = [peer_id for peer_id, _ in meeting_points(initial_peers)][:ASKED_LIMIT]
        if self._host.is_only_local or not asked:
            return self.finding
        await self._ask(asked)
        if self.is_behind_router:
            with contextlib.suppress(Unreachable):  # p2pd is busy: `keep` takes them
                await self._reserve()
        return self.finding

    def doubt(self) -> None:
        """Have others look again soon, because this machine is elsewhere than when they last
        looked."""
        self._is_doubted, self._asked_s = True, -math.inf

    async def _ask(self, peers: Sequence[str]) -> None:
        """Set `finding` to what these peers find. One that gets through is enough. Where others did
        not get through before, more than half must: a liar would have this peer give up its
        relays."""
        if not peers:  # others may come soon
            return
        self._asked_s, is_doubted = now.monotonic_s(), self._is_doubted
        self._is_doubted = False  # if it moves meanwhile, they may miss it
        await self._note_ports()
        answers = await asyncio.gather(*map(self._see, peers))
        seen = self._that_know([it for it in answers if it is not None], is_doubted)
        if not seen:
            self._is_doubted |= is_doubted
            if is_doubted or self.finding.reachability is Reachability.UNKNOWN:
                self._asked_s += UNANSWERED_AGAIN_S - ASK_AGAIN_S
            return
        through = [answer for answer in seen if answer.open_ports]
        is_open = bool(through) and (not self.is_behind_router or 2 * len(through) > len(seen))
        self._vain_rounds = 0 if is_open else self._vain_rounds + 1
        was_direct = self.finding.reachability is Reachability.DIRECT and not is_doubted
        if was_direct and self._vain_rounds == 1:  # a line may have been full as long
            self._asked_s += ASK_AGAIN_S - ASK_WHO_IS_CERTAIN_S
        else:
            self._believe(seen, is_open)

    def _that_know(self, seen: list[SeenAddress], is_doubted: bool) -> list[SeenAddress]:
        """The answers that count: those from elsewhere. Neighbours get through in any case, and
        count where nobody elsewhere has been asked since this machine is here."""
        elsewhere, known = [it for it in seen if is_public(it.host)], self.finding.public_host
        if elsewhere or (known and is_public(known) and not is_doubted):
            return elsewhere
        return seen

    def _believe(self, seen: Sequence[SeenAddress], is_open: bool) -> None:
        best = max(seen, key=lambda it: len(it.open_ports) * (1 if is_open else -1))
        if is_open:
            port, how = best.open_ports[0], Reachability.DIRECT
            reason = f"a peer that was asked got through to {best.host}, TCP port {port}"
        else:
            port, how = best.port, Reachability.UNREACHABLE
            count = sum(bool(answer.open_ports) for answer in seen)
            got = f"only {count}" if count else "none"
            reason = f"{len(seen)} asked, {got} got through to {best.host}"
        if how is not self.finding.reachability and not self._reservations:
            log.info("reachability: %s: %s", how.value, reason)
        if how is Reachability.UNREACHABLE and self._reservations:
            self.finding = replace(self.finding, public_host=best.host, public_port=port)
            return  # it stays with its relays; where its router sends from now is told to punch
        self.finding = ReachabilityFinding(how, reason, best.host, port)
        if is_open:
            self._reservations.clear()
        self._way_in = self._found_way_in(seen) if is_open else ""
        self._tell_addresses()

    def _found_way_in(self, seen: Sequence[SeenAddress]) -> str:
        """An address on a router that forwards a port because a person told it to; p2pd does not
        know of it. Most of the peers elsewhere must see this peer there: a liar would have others
        call anybody."""
        elsewhere = [
            it
            for it in seen
            if is_public(it.host) and self._own_ends.isdisjoint((it.host, p) for p in it.open_ports)
        ]
        hosts = Counter(it.host for it in elsewhere)
        for it in elsewhere:
            if it.open_ports and 2 * hosts[it.host] > len(elsewhere) and not self._announce:
                return whole(tcp_address(it.host, it.open_ports[0]), self._host.peer_id)
        return ""

    async def _see(self, peer_id: str) -> SeenAddress | None:
        try:
            return await self._callbacks.ask(peer_id, self._ports)
        except (Unreachable, Refused, PeerFault) as error:
            log.debug("reachability: %s", error)
            return None

    # ---- relays

    async def keep(self) -> None:
        """Watch over the relays, and replace those that are gone."""
        while not self._host.is_only_local:
            await asyncio.sleep(LOOK_S)
            with contextlib.suppress(Unreachable):
                await self._look_after()

    async def _look_after(self) -> None:
        now_s = now.monotonic_s()
        ends = await self._host.remote_addresses()
        is_certain = self.finding.reachability is Reachability.DIRECT and not self._is_doubted
        if now_s - self._asked_s > (ASK_WHO_IS_CERTAIN_S if is_certain else ASK_AGAIN_S):
            at = {it: end for it, (end, *_) in ends.items()}
            near = [it for it in sorted(at) if not (is_relayed(at[it]) or is_loopback(at[it]))]
            near.sort(key=lambda it: not is_from_elsewhere(at[it]))
            # peers that connect may be anybody, and many of them one
            trusted = [*filter(self._host.calling.trusts, near)]
            await self._ask((trusted or ([] if is_certain else near))[:ASKED_LIMIT])
        for relay in [relay for relay in self._reservations if relay not in ends]:
            del self._reservations[relay]
            log.warning("the relay %s is gone: those that it passed on must go another way", relay)
            self._settle()
        due = [relay for relay, held in self._reservations.items() if held.renew_s < now_s]
        if self.is_behind_router and (due or len(self._reservations) < RELAYS_WANTED):
            await self._reserve()

    async def _reserve(self) -> None:
        """Ask directly connected peers to be relays, until enough have said yes."""
        now_s, trusts, asked = now.monotonic_s(), self._host.calling.trusts, 0
        ends = await self._host.remote_addresses()
        # a peer that connects may be anybody, say nothing for long, and choose its id
        in_turn = sorted(ends, key=lambda it: (it not in self._reservations, not trusts(it), it))
        for relay in in_turn:
            address, held = ends[relay][0], self._reservations.get(relay)
            wanted = held is not None and held.renew_s < now_s
            if held is None and len(self._reservations) < RELAYS_WANTED:
                wanted = asked < ASKED_LIMIT and self._unwilling.get(relay, 0.0) < now_s
            if not wanted or is_relayed(address) or is_loopback(address):
                continue
            asked += held is None
            try:
                granted_s = await reserve(self._host, relay)
            except (Unreachable, Refused) as error:
                if held is not None and held.may_miss and isinstance(error, Unreachable):
                    self._reservations[relay] = held.missed()  # asked again at the next look
                    continue
                log.info("no relay: %s", error)
                put_newest(self._unwilling, relay, now_s + ASK_AGAIN_S, PEERS_REMEMBERED)
                self._reservations.pop(relay, None)
                continue
            full = relayed_address(address, relay, self._host.peer_id)
            self._reservations[relay] = _Reservation(full, now_s + min(granted_s / 2, RENEW_S))
            if held is None:
                log.info("others reach this peer through the relay %s", relay)
        self._settle()

    def _settle(self) -> None:
        """State how this peer is reached, with the relays that it has now."""
        count, before = len(self._reservations), self.finding
        if count:
            how, reason = Reachability.RELAYED, f"behind a router, reached through {count} relay"
            reason += "s" if count > 1 else ""
        else:
            how = Reachability.UNREACHABLE
            reason = "behind a router, and no peer that it knows relays"
        self.finding = ReachabilityFinding(how, reason, before.public_host, before.public_port)
        if how is not before.reachability:
            log.info("reachability: %s: %s", how.value, reason)
        self._tell_addresses()

    def _tell_addresses(self) -> None:
        addresses = tuple(held.address for _, held in sorted(self._reservations.items()))
        if self._way_in:
            addresses = (self._way_in,)
        if addresses != self._found:
            self._host.found_addresses = addresses
            self.changed.set()

    # ---- from relayed to direct

    async def straighten(self, peer_id: str, addresses: Sequence[str]) -> None:
        """Try for a direct connection, once in a while, where the way to a peer leads through a
        relay."""
        known = [address for address in addresses if is_relayed(address)]
        if self._host.is_only_local or not known:
            return
        now_s = now.monotonic_s()
        tried_s = max(
            self._punched_s.get(peer_id, -PUNCH_AGAIN_S),
            self._punching.asked_s.get(peer_id, -PUNCH_AGAIN_S),
        )
        if now_s - tried_s < PUNCH_AGAIN_S:
            return
        with contextlib.suppress(Unreachable):
            if await self._host.direct_address(peer_id) is not None:
                return
        if len(self._punched_s) >= PEERS_REMEMBERED:
            self._punched_s.clear()
        self._punched_s[peer_id] = now_s
        plain = tuple(address.removesuffix(f"/p2p/{peer_id}") for address in known)
        if await self._punching.punch(peer_id, plain):
            log.info("direct connection to %s, where a relay was between", peer_id)
        else:
            log.info("no direct connection to %s: it goes through a relay", peer_id)

    async def close(self) -> None:
        """Serve nobody any more."""
        await self._punching.close()
        await self._callbacks.close()


def meeting_points(addresses: Sequence[str]) -> list[tuple[str, str]]:
    """(peer id, address) of the peers that were called directly; for a relayed address, of its
    relay."""
    found = {}
    for text in addresses:
        peer_id, where = parse_address(text)
        if is_relayed(where):
            where, _, rest = where.partition("/p2p/")
            peer_id = rest.split("/", 1)[0]
        if not is_loopback(where):
            found[peer_id] = where
    return list(found.items())


def relay_of(far_end: str) -> str:
    """The peer id of the relay in the far end of a relayed connection."""
    return far_end.split("/p2p/", 1)[1].split("/", 1)[0]


def opening_fix(
    public_host: str, addresses: Sequence[str], listen: Sequence[str], takes_lines: bool
) -> str:
    """What the user can do to open the way in, with this machine's addresses and ports."""
    own = [host for host, _ in map(host_and_port, addresses)]
    chosen = next((port for _, port in map(host_and_port, listen) if port), None)
    port = chosen or USUAL_PORT
    ports = ports_text(port, takes_lines)
    if public_host in own:
        allowed = f"{port}:{port + 1}" if takes_lines else port
        return (
            f"open {ports} of {public_host} in the firewall (sudo ufw allow {allowed}/tcp), "
            f"and start with --listen /ip4/0.0.0.0/tcp/{port}"
        )
    inward = next((host for host in own if not is_public(host)), "this machine")
    told = (
        f"on the router at {public_host}, forward {ports} to {inward}, and start with "
        f"--listen /ip4/0.0.0.0/tcp/{port}"
    )
    if chosen is not None:
        return told
    others = f"TCP port {SECOND_PORT}"
    if takes_lines:
        others = f"TCP ports {SECOND_PORT} and {SECOND_PORT + 1}"
    return f"{told}; a second machine behind that router takes {others} in the same way"


def ports_text(port: int, takes_lines: bool) -> str:
    """The ports to open. Where direct lines are taken, tensors have a port of their own."""
    if not takes_lines:
        return f"TCP port {port}"
    return f"TCP ports {port} and {port + 1} (the second for direct lines)"
