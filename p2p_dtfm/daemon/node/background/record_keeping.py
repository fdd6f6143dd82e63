"""Keeps this peer's record true while it takes part: links, its place, and what steps take."""

import asyncio
import contextlib
from collections.abc import Mapping

from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.background.replanning import Replanning
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.peers.self_record import PROBED_PEERS_LIMIT
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.ports import now

RECORD_REFRESH_S = 1.0
MEASURING_S = 5.0
"""So long links are measured one after another, until this loop does other things as well."""
REPLAN_QUIET_S = 5.0
"""How long this peer's own facts must be unchanged before they are worth a new plan."""


class RecordKeeping:
    """Puts what is measured into the record, for the next view."""

    def __init__(self, participant: Participant) -> None:
        self._membership = membership = participant.membership
        self._agreement = membership.agreement
        self._me = membership.network.me.peer_id
        self._life = participant.local.life
        self._network = participant.network
        self._messenger = participant.network.messenger
        self._bulk = participant.bulk
        self._replanning = Replanning(participant)
        self._placed_s = 0.0
        self._places_of: View | None = None

    async def keep(self) -> None:
        """Keep the record up to date: links to peers that turned up later, and live traffic.

        Facts that are news to the view in force are worth a new plan, once things are quiet.
        """
        record, quiet_since_s = self._membership.self_record, now.monotonic_s()
        while not self._life.leaving.is_set():
            await asyncio.sleep(RECORD_REFRESH_S)
            changed = await self.measure_links()
            await self._refresh_place()
            changed = record.learn_from_traffic(self._bulk.link_estimate) or changed
            if record.differs_in_steps(self._membership.plan_times.told()):
                self._membership.set_record()
            if changed:
                self._membership.set_record()
                quiet_since_s = now.monotonic_s()
            self._replanning.if_slow()
            if not changed and now.monotonic_s() - quiet_since_s > REPLAN_QUIET_S:
                self._replanning.if_news()
                quiet_since_s = now.monotonic_s()

    async def measure_links(self) -> bool:
        """Measure links to peers that turned up since, or to which it failed before. Returns
        whether one was measured. After a while the rest is left for the next turn: members that are
        away take long not to answer, and what comes after this in the loop would wait for all."""
        record, lives, changed = self._membership.self_record, self._membership.lives(), False
        record.state_lives(lives)
        end_s = now.monotonic_s() + MEASURING_S
        for peer_id in record.unmeasured(sorted(self._worth_measuring(lives))):
            if await record.probe_one(peer_id, self._messenger):
                changed = True
                self._compare_with_estimate(peer_id)
            if now.monotonic_s() > end_s:
                break
        return changed

    def _worth_measuring(self, lives: Mapping[str, int]) -> set[str]:
        """Peers whose link is worth measuring. Where more are known than are measured, peers that
        have gone are left out: they take no place, and no turn, of those that are there."""
        there = {*lives, *self._membership.waiting_too}
        known = there.union(self._messenger.known)
        is_too_many = len(known) > PROBED_PEERS_LIMIT and self._agreement.view is not None
        return there if is_too_many else known

    def _compare_with_estimate(self, peer_id: str) -> None:
        view, link = self._agreement.view, self._membership.self_record.link_to(peer_id)
        if view is not None and link is not None:
            self._membership.estimates.measured_in(view.snapshot, self._me, peer_id, link)

    async def _refresh_place(self) -> None:
        """In a large swarm, take another round trip to one of the connected members."""
        place, now_s = self._membership.self_record.place, now.monotonic_s()
        if not place.is_asked_for or now_s - self._placed_s < place.refresh_s:
            return
        self._placed_s = now_s
        if (view := self._agreement.view) is not None and view is not self._places_of:
            self._places_of = view
            place.learn(view.snapshot.records)
        with contextlib.suppress(Unreachable, Refused):
            linked = await self._network.host.connected_peers()
            if peer_id := place.next_to_ask(sorted({*linked} & self._membership.members())):
                await self._network.probes.ask_once(peer_id)
