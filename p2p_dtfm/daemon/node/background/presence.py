"""Tells others where this peer is, and learns where other peers of the run are."""

import asyncio
import contextlib
import logging
import math
from collections.abc import Iterable

from p2p_dtfm.core.gate.gate_table import FAR
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.facts.publishing import Publishing
from p2p_dtfm.daemon.peers.facts.twin import Twin
from p2p_dtfm.net.contacts.addresses import is_loopback, is_relayed
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import chance, now, rarely

log = logging.getLogger("p2p_dtfm")

STRANGERS_TRIED = 4
PRESENCE_REFRESH_S = 20.0
PRESENCE_RETRY_S = 3.0
"""The pause after no node took the presence: those asked may have had to look for the run."""
CROWD = 8
"""A view of this many members looks for others half as often, one of twice as many a third as
often."""
WAY_REFRESH_S = 5.0
WAY_RETRY_S = 1.0
MOVED_AGAIN_S = 60.0
"""Others are told of new addresses at most this often, since a machine's own addresses may change
to and fro."""


class PresenceKeeping:
    """Keeps this peer's presence in the directory, and its addresses in its record."""

    def __init__(self, participant: Participant) -> None:
        self._membership = membership = participant.membership
        self._agreement = membership.agreement
        self._me = membership.network.me.peer_id
        self._run = membership.run
        self._local = participant.local
        self._network = participant.network
        self._bulk = participant.bulk
        self._messenger = participant.network.messenger
        self._moved = asyncio.Event()
        """Set when this peer's addresses are other than those in its presence."""
        self._told_s = -math.inf
        """When the record last stated another way."""
        self._own: set[str] | None = None
        """This machine's own addresses at that time; None: as the record has them."""
        self._publishing = Publishing(
            membership.acquaintances.directory,
            self._run.digest,
            participant.local.settings.publish and not self._run.spec.admission.is_invited,
        )
        self._twin = Twin(self._local.home.identity)
        self._presences = 0
        self._began_s = now.monotonic_s()

    async def keep(self) -> None:
        """Publish the presence anew before it ends, and at once when it is news."""
        directory = self._membership.acquaintances.directory
        while True:
            accepted = False
            try:
                presence = Presence(
                    peer_id=self._me,
                    life=self._membership.me.life,
                    addresses=await self._network.host.addresses(),
                    run_digest=self._run.digest,
                )
                if self._looks_around():
                    await directory.meet_again()
                    await directory.publish_run(self._run.digest, self._run.signed_spec)
                    # read before this peer's own presence replaces that of a twin with its id
                    present = await directory.present_peers(self._run.digest)
                    self._meet_present([] if rarely.happens("nobody there") else present)
                accepted = await directory.publish_presence(presence)
                accepted &= await self._publishing.publish(
                    self._membership.self_record,
                    self._membership.sign,
                    None if self._agreement.is_outside else self._agreement.view,
                    self._local.observer.step(),
                )
            except Unreachable as error:
                log.warning("directory: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_REFRESH_S if accepted else PRESENCE_RETRY_S):
                    await self._moved.wait()
            self._moved.clear()

    def _looks_around(self) -> bool:
        """Whether to look for others and publish the spec this time. Where many know one another,
        each does so only now and then: all publish the same spec."""
        self._presences += 1
        view = self._agreement.view
        members = 0 if view is None else len(view.members)
        return self._presences == 1 or self._presences % (1 + members // CROWD) == 0

    def _meet_present(self, present: list[Presence]) -> None:
        """Get to know the peers that are present, since they may be in another view. There may be
        any number that were never in a view with this peer, so a few of those are tried each time.
        Raises `UserError` where one has this peer's own id."""
        lived_s = now.monotonic_s() - self._began_s
        me, wall_s = self._membership.me, now.wall_s()
        self._twin.require_none(present, me, wall_s - lived_s, wall_s)
        others = [peer for peer in present if peer.peer_id != self._me]
        roles = {peer.peer_id: self._network.keeper.role_of(peer.peer_id) for peer in others}
        strangers = [peer for peer in others if roles[peer.peer_id] in FAR]
        tried = chance.sample(strangers, min(len(strangers), STRANGERS_TRIED))
        for peer in (*(peer for peer in others if roles[peer.peer_id] not in FAR), *tried):
            self._messenger.hear_of(peer.peer_id, peer.addresses)
            self._agreement.know(peer.peer_id)

    async def keep_reachable(self) -> None:
        """Tell others when this peer is reached another way. Links that now lead another way are
        measured anew."""
        while not self._network.host.is_only_local:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAY_REFRESH_S):
                    await self._network.reachability.changed.wait()
            try:
                await self._tell_where()
                ends = await self._network.host.remote_addresses()
            except Unreachable as error:
                log.debug("%s", error)
                await asyncio.sleep(WAY_RETRY_S)
                continue
            self._network.far_ends = {peer: end for peer, (end, *_) in ends.items()}
            straight = {peer: not is_relayed(end) for peer, end in self._network.far_ends.items()}
            for peer_id in self._membership.self_record.forget_where_changed(straight):
                self._bulk.forget_rate(peer_id)

    async def _tell_where(self) -> None:
        """State where others reach this peer, if the record says otherwise. While there is no
        network the record stays as it was."""
        way, record = self._network.reachability, self._membership.self_record
        addresses = await self._network.host.addresses()  # raises if unknown; it is told later then
        how, is_due = way.finding.reachability, way.changed.is_set()
        way.changed.clear()
        now_s = now.monotonic_s()
        is_due |= now_s - self._told_s >= MOVED_AGAIN_S
        if not is_due or record.leads_to(addresses, how) or all(map(is_loopback, addresses)):
            return
        found = self._network.host.found_addresses
        before = _own(record.addresses, found) if self._own is None else self._own
        self._own = _own(addresses, found)
        if self._own != before:
            log.info("this machine's addresses are others now: %s", ", ".join(addresses))
            way.doubt()
            self._membership.acquaintances.look_around()
        self._told_s = now_s
        record.state_reachability(addresses, how)
        self._membership.set_record()
        self._moved.set()


def _own(addresses: Iterable[str], found: Iterable[str]) -> set[str]:
    """Addresses of this machine itself, without those of relays and those that others have
    `found`."""
    return {address for address in addresses if not is_relayed(address)} - {*found}
