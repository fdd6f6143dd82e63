"""A daemon's place in the network. It is there before any run is known, and ends with the
daemon."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Protocol

from p2p_dtfm.core.liveness.liveness import LAN_LIVENESS, WAN_LIVENESS, Liveness
from p2p_dtfm.core.messages.on_the_wire import Unreadable
from p2p_dtfm.core.protocol.errors import UNREACHABLE, P2pdLost, PeerFault, UserError
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.invited.chains import NOT_INVITED
from p2p_dtfm.core.protocol.invited.line import read_line
from p2p_dtfm.core.protocol.records import PROTOCOL_VERSION
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Member
from p2p_dtfm.daemon.node.local import Local
from p2p_dtfm.daemon.peers.bootstrap_node import REFUSAL as BOOTSTRAP_REFUSAL
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.guests.guest_book import GuestBook, book_of
from p2p_dtfm.daemon.peers.guests.own_invitation import (
    OwnInvitation,
    invitation_of,
    not_let_in,
)
from p2p_dtfm.daemon.peers.messenger import Messenger
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.daemon.peers.recall import Past
from p2p_dtfm.daemon.peers.wire import Hello, Introduction, Knock, Message, unpack
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.telemetry.trace_collector import TraceCollector
from p2p_dtfm.net.contacts.addresses import is_relayed, peer_ids_of
from p2p_dtfm.net.contacts.calling import put_newest
from p2p_dtfm.net.contacts.first_contacts import (
    FIRST_CONNECT_DEADLINE_S,
    reach_any,
    reach_first_peers,
)
from p2p_dtfm.net.errors import Unreachable, is_unanswered, no_relay_has_it, nobody_listens
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.shaping import LineLimit, Shape, Shaper
from p2p_dtfm.net.streams.blobs import BlobExchange
from p2p_dtfm.net.streams.probing import Probes
from p2p_dtfm.ports import chance, now

CALL_LIMIT_S = 3.0
CALLED_LIMIT = 16
LATELY_S = 5.0
"""Members say something more often than that."""

DISCONNECTED = "disconnected %s: %s"
FAULTS_TOLD_EVERY_S = 10.0
"""How often the log tells of one peer's faults at most: a peer may open lane after lane."""
FAULTS_OF_LIMIT = 4096

log = logging.getLogger("p2p_dtfm")


class Inside(Protocol):
    """What answers messages and requests that come through the gate."""

    async def answer(self, sender: str, message: Message) -> bytes:
        """Raises `PeerFault`."""

    def open_blob(self, digest: str) -> Path | bytes | memoryview | None:
        """A file of the run; None if it is not here."""

    def unread(self, digest: str) -> Callable[[], bool] | None:
        """A check to run in a thread before a file is given: see `net.streams.blobs.Unread`."""

    def require_may_have(self, sender: str, digest: str) -> None:
        """Raises `PeerFault` where a file is not for `sender`."""

    def name_of(self, digest: str) -> str:
        """What a file is, for those who watch a download."""

    def stream_lost(self, sender: str) -> None:
        """A stream of `sender` has ended by its own fault."""


class NoRunYet:
    """Answers others before this peer takes part in a run."""

    async def answer(self, sender: str, message: Message) -> bytes:
        if isinstance(message, Hello | Introduction | Knock):
            raise PeerFault("this peer has no run yet, try again in a moment", sender)
        raise PeerFault("this peer does not take part in a run yet", sender)

    def open_blob(self, digest: str) -> Path | bytes | memoryview | None:
        return None

    def unread(self, digest: str) -> Callable[[], bool] | None:
        return None

    def require_may_have(self, sender: str, digest: str) -> None:
        """There is nothing to get."""

    def name_of(self, digest: str) -> str:
        return f"file {digest[:8]}"

    def stream_lost(self, sender: str) -> None:
        """Nothing waits for the stream."""


class Network:
    """Host, gate and messages; what comes in is answered by `inside`, once there is a run."""

    def __init__(
        self, local: Local, host: HostPort, life: int, first_contacts: tuple[str, ...]
    ) -> None:
        settings = local.settings
        self.inside: Inside = NoRunYet()
        self.host = host
        self.me = Member(host.peer_id, life)
        """This peer and its life when the process began. A peer that rejoins begins another
        life."""
        self.first_contacts = first_contacts
        """Addresses that were reached before anything else."""
        self.far_ends: dict[str, str] = {}
        """The address of each connected peer's end; empty on loopback."""
        self.liveness = Liveness(LAN_LIVENESS if settings.is_near else WAN_LIVENESS)
        self.evidence = asyncio.Event()
        """Set when a peer may have ended, or when another says how it hears one. That is to be
        judged now."""
        self.keeper = GateKeeper.of(host)
        self.invitation: OwnInvitation | None = None
        """This peer's invitation, as soon as the run is known to be by invitation."""
        self.guest_book: GuestBook | None = None
        """Who may be in the run by invitation, once its spec is known."""
        self.faults_told_s: dict[str, float] = {}
        """When the log last named a fault of each peer."""
        self.refusal = ""
        """Why nobody lets this peer in to a run, which may not be the one that the user wants."""
        self.reachability = ReachabilityService(
            host, settings.relay, settings.listen, settings.announce
        )
        self.control = ControlPlane(host, self._serve)
        self.messenger = Messenger(
            host,
            self.control,
            life,
            self._on_heard,
            self.on_broken,
            self.reachability.straighten,
        )
        self.traces = TraceCollector(local.recorder, self.messenger, host)
        self.probes = Probes(host)
        self.blobs = BlobExchange(
            host,
            lambda digest: self.inside.open_blob(digest),
            self.on_fault,
            self._on_download,
            lambda sender, digest: self.inside.require_may_have(sender, digest),
            lambda digest: self.inside.unread(digest),
        )
        self._status = local.status

    @classmethod
    async def start(
        cls,
        local: Local,
        life: int,
        past: Past,
        stack: contextlib.AsyncExitStack,
    ) -> "Network":
        """Raises `UserError` if no peer that should be there is reached, or none lets this peer
        in."""
        settings, status = local.settings, local.status
        status.say(State.STARTING, "starts libp2p")
        host = await local.world.start_host(
            local.home.identity, settings.listen, settings.announce, settings.port_mapping
        )
        stack.push_async_callback(host.close)
        local.life.spawn(_until_lost(host))
        network = cls(local, host, life, await _first_contacts(local, host, past.addresses))
        local.observer.guarded_by(network.keeper.refused_most)
        network._limit_line(local)
        local.observer.seen.names.own(host.peer_id, local.settings.name)
        log.info("peer %s (%s)", local.observer.seen.names.of(host.peer_id), host.peer_id)
        await network.control.ready()  # from now on others are answered
        stack.push_async_callback(network.control.close)
        await network._introduce(local, past)
        await network.reachability.ready()
        stack.push_async_callback(network.reachability.close)
        status.say(State.STARTING, "asks whether others can reach this machine")
        await network.reachability.find(network.first_contacts)
        local.life.spawn(network.reachability.keep())
        stack.push_async_callback(network.messenger.close)
        local.observer.meets(network.messenger)
        await network.probes.ready()
        await network.blobs.ready()
        return network

    def _limit_line(self, local: Local) -> None:
        settings, host = local.settings, self.host
        if settings.shape is not None:
            shaper = host.shaper = Shaper(Shape.load(settings.shape), host.peer_id)
            local.life.spawn(shaper.follow(settings.shape))
            log.info("shaped links: %s", shaper.label)
        elif settings.uplink_mbps or settings.downlink_mbps:
            host.shaper = LineLimit(settings.uplink_bytes_per_s, settings.downlink_bytes_per_s)

    async def _introduce(self, local: Local, past: Past) -> None:
        """Show this peer's invitation before it asks for anything else. Raises `UserError` if all
        that have a say in it refuse. If the user named a run spec, `come_to` raises that once its
        data are read and it is known to be this run."""
        settings, recalled = local.settings, past.recalled
        line = read_line(settings.invite) if settings.invite else None
        digest = recalled.run_digest if recalled is not None else settings.run_digest
        spec = recalled.spec if recalled is not None else None
        if line is None and (spec is None or not spec.admission.is_invited):
            return
        directory = local.home.run_directory(digest)
        self.invitation = invitation_of(directory, self.host.identity, line, spec)
        if self.invitation is None or self.invitation.introduction is None:
            return
        self.messenger.introduction = self.invitation.introduction
        contacts = peer_ids_of(self.first_contacts)
        answers = await asyncio.gather(*map(self.messenger.turned_away, contacts))
        of_members = [reason for reason in answers if reason is not None]
        reasons = [reason for reason in of_members if reason]
        if reasons and len(reasons) == len(of_members):
            self.refusal = reasons[0]
            if not settings.run:
                raise not_let_in(self.refusal)

    def come_to(self, run_digest: str) -> None:
        """The run that this peer founds or goes on with is `run_digest`. If its invitation is to
        another run, it says nothing of it any more. Raises `UserError` where it is not let in."""
        if self.invitation is None or self.invitation.run_digest != run_digest:
            self.invitation = self.messenger.introduction = None
        elif self.refusal:
            raise not_let_in(self.refusal)

    async def why_turned_away(self, error: UserError) -> UserError:
        """The error to show in place of `error`. If all first contacts but bootstrap nodes refuse a
        question that anybody may ask, they train by invitation, and the error says that. A refusal
        by one alone says nothing of the wanted run: that peer may train another by now."""
        hello = Hello(PROTOCOL_VERSION, ())
        causes = []
        for peer_id in peer_ids_of(self.first_contacts):
            try:
                await self.messenger.ask(peer_id, hello, CALL_LIMIT_S)
                return error
            except (Unreachable, PeerFault) as answer:
                if BOOTSTRAP_REFUSAL in answer.cause:  # a bootstrap node has no say in it
                    continue
                if NOT_INVITED not in answer.cause:
                    return error
                causes.append(answer.cause)
        return not_let_in(causes[0]) if causes else error

    def let_in_by_invitation(self, spec: RunSpec, directory: Path) -> None:
        """Set the guest book up, for a run that is by invitation. Raises `UserError` where this
        peer has no invitation."""
        own = self.invitation
        if own is None or own.run_digest != spec.digest():
            own = self.invitation = OwnInvitation(directory, spec.digest(), self.host.identity)
        self.guest_book = book_of(own, spec)
        self.keeper.guests = self.guest_book.known
        self.messenger.introduction = own.introduction

    def others(self) -> list[str]:
        """All peers whose addresses are known, but for this one."""
        return [peer for peer in self.messenger.known if peer != self.me.peer_id]

    def donors(self, newcomers: Iterable[str] = ()) -> list[str]:
        """The peers of `others`, in the order in which they are asked for a file. Those heard
        lately come first, in any order, then the silent ones, which would cost three seconds each.

        Last come those `newcomers` that were heard lately. What they have may be nowhere else, and
        without it no step would be taken and they would not be let in.
        """
        now_s, heard_s = now.monotonic_s(), self.messenger.heard_s

        def is_near(peer: str) -> bool:
            return now_s - heard_s.get(peer, -LATELY_S) < LATELY_S

        others = self.others()
        lately = set(filter(is_near, others))
        near = chance.sample(sorted(lately), len(lately))
        silent = (peer for peer in others if peer not in lately)
        waiting = {*newcomers}.difference(others, (self.me.peer_id,))
        return [*near, *silent, *sorted(filter(is_near, waiting))]

    # what comes in -------------------------------------------------------------------------------

    async def _serve(self, sender: str, body: bytes) -> bytes:
        try:
            _, message, size_bytes = unpack(body, partial(self.keeper.require_readable, sender))
        except Unreadable:
            self.keeper.blame(sender, "control")
            raise
        self.keeper.require_message(sender, message, size_bytes)
        self.messenger.heard(sender)
        if isinstance(message, Hello) and message.protocol_version == PROTOCOL_VERSION:
            self.messenger.greeted_by(sender)
        return await self.inside.answer(sender, message)

    def _on_heard(self, peer_id: str) -> None:
        self.liveness.heard(peer_id, now.monotonic_ns())

    def on_broken(self, peer_id: str, cause: str) -> None:
        """A stream to this peer broke, or a call to it failed. A peer that does not answer in time
        is spoken to again. What else is heard of it says whether it is silent."""
        self.evidence.set()
        if is_unanswered(cause):
            self.liveness.speak_to((peer_id,))
            return
        is_rerouted = self.is_relayed(peer_id) and not no_relay_has_it(cause)
        now_ns = now.monotonic_ns()
        self.liveness.stream_reset(peer_id, now_ns, nobody_listens(cause), is_rerouted)

    def is_relayed(self, peer_id: str) -> bool:
        """Whether the way to a peer leads through a relay. Where no way was seen yet, whether it
        may."""
        if (far_end := self.far_ends.get(peer_id)) is not None:
            return is_relayed(far_end)
        return any(map(is_relayed, self.messenger.where(peer_id)))

    def on_fault(self, sender: str, fault: PeerFault) -> None:
        """A stream of `sender` ends, because it carries what is not allowed."""
        told_s, now_s = self.faults_told_s.get(sender), now.monotonic_s()
        is_news = told_s is None or now_s - told_s >= FAULTS_TOLD_EVERY_S
        if is_news:
            put_newest(self.faults_told_s, sender, now_s, FAULTS_OF_LIMIT)
        level = logging.WARNING if is_news else logging.DEBUG
        log.log(level, DISCONNECTED, sender, fault.cause)
        self.inside.stream_lost(sender)

    def _on_download(self, digest: str, done_bytes: int, total_bytes: int) -> None:
        self._status.receives(self.inside.name_of(digest), done_bytes, total_bytes)


async def _until_lost(host: HostPort) -> None:
    """Wait for the end of this peer's p2pd, also while the peer starts or looks for a run. Raises
    `UserError` once p2pd has ended by itself."""
    await host.lost.wait()
    raise p2pd_has_ended()


def p2pd_has_ended() -> P2pdLost:
    return P2pdLost(
        "the libp2p daemon of this peer has ended by itself",
        "start p2p-dtfm again; it takes up where the swarm is",
    )


async def _first_contacts(
    local: Local, host: HostPort, remembered: tuple[str, ...] | None
) -> tuple[str, ...]:
    """Call the initial peers; returns the addresses that were reached. Where there are none, or
    none answers, the remembered peers are called. Raises `UserError` where nobody is remembered
    either."""
    initial = local.settings.initial_peers
    if initial:
        patience_s = FIRST_CONNECT_DEADLINE_S if remembered is None else CALL_LIMIT_S
        try:
            return await reach_first_peers(host, initial, patience_s)
        except UserError as error:
            if remembered is None or error.exit_code != UNREACHABLE:
                raise
            log.warning("%s", error.cause)
    if not remembered:
        return ()
    addresses = remembered[:CALLED_LIMIT]
    local.status.say(State.STARTING, f"calls {counted(len(addresses), 'peer')} that it met before")
    return await reach_any(host, addresses, CALL_LIMIT_S)
