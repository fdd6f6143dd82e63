"""What a daemon does all the time beside training: heartbeats, presence, measurements, data."""

import asyncio
import contextlib
import logging
import random
import time

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.gate.gate_table import FAR
from p2p_dtfm.core.messages.agreement_messages import Heartbeat
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.daemon.node.dispatch import Dispatch
from p2p_dtfm.daemon.node.membership import DATA_RETRY_S, TICK_S
from p2p_dtfm.daemon.node.peer_state import REPLAN_INTERVAL_S
from p2p_dtfm.net.contacts.addresses import is_relayed
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.net.streams.blobs import BlobUnavailable

log = logging.getLogger("p2p_dtfm")

DATA_KEPT_LIMIT_BYTES = 2 << 30
STRANGERS_TRIED = 4
PRESENCE_REFRESH_S = 20.0
WAY_REFRESH_S = 5.0
RECORD_REFRESH_S = 1.0
REPLAN_QUIET_S = 5.0
"""How long this peer's own facts must be unchanged before they are worth a new plan."""


class Background(Dispatch):
    """Loops that run from when this peer takes part until it ends."""

    async def _tick_loop(self) -> None:
        assert self._agreement is not None and self._checkpoints is not None
        while True:
            await asyncio.sleep(TICK_S)
            now_ns = time.monotonic_ns()
            self._agreement.has_saved(self._checkpoints.saved)
            self._beat(self._agreement, now_ns)
            self._do(self._agreement.tick(now_ns))
            self._leave_at_last()

    async def _timeline_loop(self) -> None:
        """While a page is open, show it a late step of this peer's pipeline."""
        agreement = self._agreement
        assert agreement is not None
        await self._traces.keep_timeline(
            lambda: agreement.view, lambda: self._dashboard.watched, self.observer.show_timeline
        )

    def _beat(self, agreement: Agreement, now_ns: int) -> None:
        """Say that this peer lives, and find out who does not."""
        assert self._trainer is not None
        watched: set[str] = set()
        for view in (agreement.view, agreement.next_view):
            if view is not None and agreement.me in view.members:
                watched |= set(view.member_ids)
        self._liveness.watch(watched - {self._me.peer_id}, now_ns)
        assert self._step_watch is not None
        for suspicion in self._liveness.tick(now_ns):
            self._do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        for suspicion in self._step_watch.tick(agreement, watched, now_ns):
            self._do(agreement.holds_up(suspicion.peer_id, suspicion.reason, now_ns))
        if due := self._liveness.due_heartbeats(now_ns):
            work = self._step_watch.work(agreement)
            beat = Heartbeat(agreement.me, self._progress, work)
            for peer_id in due:
                self._messenger.tell(peer_id, beat)

    @property
    def _progress(self) -> int:
        """What this peer has computed and fetched: a newcomer that fetches its states gets on."""
        return self.compute.done_count + (self._blobs.received_bytes >> 16)

    def _on_call_failed(self, peer_id: str) -> None:
        self._liveness.stream_reset(peer_id, time.monotonic_ns())

    def _on_heard(self, peer_id: str) -> None:
        self._liveness.heard(peer_id, time.monotonic_ns())

    async def _presence_loop(self) -> None:
        assert self._run is not None and self._agreement is not None
        while True:
            try:
                presence = Presence(
                    peer_id=self._me.peer_id,
                    life=self._life,
                    addresses=await self._host.addresses(),
                    run_digest=self._run.digest,
                )
                await self._directory.publish_run(self._run.digest, self._run.signed_spec)
                await self._directory.publish_presence(presence)
                self._meet_present(await self._directory.present_peers(self._run.digest))
            except Unreachable as error:
                log.warning("directory: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_REFRESH_S):
                    await self._moved.wait()
            self._moved.clear()

    def _meet_present(self, present: list[Presence]) -> None:
        """Others of this run may be in another view; of those that were never in one with this
        peer there may be any number, and so a few are tried each time."""
        assert self._agreement is not None
        others = [peer for peer in present if peer.peer_id != self._me.peer_id]
        roles = {peer.peer_id: self._keeper.role_of(peer.peer_id) for peer in others}
        strangers = [peer for peer in others if roles[peer.peer_id] in FAR]
        tried = random.sample(strangers, min(len(strangers), STRANGERS_TRIED))
        for peer in (*(peer for peer in others if roles[peer.peer_id] not in FAR), *tried):
            self._messenger.hear_of(peer.peer_id, peer.addresses)
            self._agreement.know(peer.peer_id)

    async def _reachability_loop(self) -> None:
        """Tell others when this peer is reached another way, and notice links that lead another
        way: those are measured anew."""
        while not self._host.is_only_local:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAY_REFRESH_S):
                    await self._reachability.changed.wait()
            try:
                if self._reachability.changed.is_set():
                    self._reachability.changed.clear()
                    self._self_record.state_way_in(
                        await self._host.addresses(), self._reachability.finding.reachability
                    )
                    self._set_record()
                    self._moved.set()
                ends = await self._host.remote_addresses()
            except Unreachable as error:
                log.debug("%s", error)
                continue
            self._far_ends = {peer: end for peer, (end, *_) in ends.items()}
            straight = {peer: not is_relayed(end) for peer, end in self._far_ends.items()}
            self._self_record.forget_where_changed(straight)

    async def _record_loop(self) -> None:
        """Keep the record up to date: links to peers that turned up later, and live traffic.

        Facts that are news to the view in force are worth a new plan, once things are quiet.
        """
        quiet_since_s = time.monotonic()
        while not self._leaving.is_set():
            await asyncio.sleep(RECORD_REFRESH_S)
            newcomers = (record.peer_id for record in self._joiners())
            candidates = {*self._messenger.known, *newcomers, *self._waiting_too}
            waiting = self._self_record.unmeasured(sorted(candidates))
            changed = False
            for peer_id in waiting:
                changed = await self._self_record.probe_one(peer_id, self._messenger) or changed
            changed = self._self_record.learn_from_traffic(self._bulk.link_estimate) or changed
            if self._self_record.differs_in_steps(self._plan_times.told()):
                self._set_record()
            if changed:
                self._set_record()
                quiet_since_s = time.monotonic()
            self._replan_if_slow()
            if not changed and time.monotonic() - quiet_since_s > REPLAN_QUIET_S:
                self._replan_if_news()
                quiet_since_s = time.monotonic()

    def _joiners(self) -> tuple[PeerRecord, ...]:
        return self._agreement.joiners if self._agreement is not None else ()

    def _replan_if_news(self) -> None:
        """Ask for a view with this peer's present record, if the one in force has an older one."""
        agreement = self._agreement
        assert agreement is not None
        view = agreement.view
        if view is None or self._me not in view.members or len(view.members) == 1:
            return
        now_s = time.monotonic()
        if now_s - self._replanned_s < REPLAN_INTERVAL_S:
            return
        if self._self_record.is_news_to(view.snapshot):
            self._replanned_s = now_s
            self._do(agreement.request_replan("links were measured", time.monotonic_ns()))

    def _replan_if_slow(self) -> None:
        """Steps take much longer than planned, or than under an earlier plan: what is measured
        goes into this peer's record, and the members plan from it."""
        agreement = self._agreement
        assert agreement is not None
        view = agreement.view
        if view is None or self._me not in view.members or len(view.members) == 1:
            return
        if self._plan_times.reason is not None:
            seen = self._device_pace.seen(self._self_record.device, view, self._me.peer_id)
            if seen is not None:
                self._self_record.state_device(seen)
                self._set_record()
        reason = self._plan_times.why_anew()
        if reason is not None:
            log.info("%s", reason)
            self.observer.note(reason)
            self._do(agreement.request_replan(reason, time.monotonic_ns()))

    @property
    def _disk_limit_bytes(self) -> int:
        return int(self.settings.disk_gib * (1 << 30))

    async def _data_loop(self) -> None:
        """Bring all data here ahead of need, so that no peer's death takes the only copy along.

        Corpora above the limit stay with those whose steps read them.
        """
        assert self._run is not None
        sizes = self._run.manifest.blobs()
        limits = [DATA_KEPT_LIMIT_BYTES, self._disk_limit_bytes // 2]
        if sum(sizes.values()) > min(filter(None, limits)):
            return
        order = sorted(sizes)
        start = sum(self._me.peer_id.encode()) % len(order)  # not all fetch the same one first
        while self._me.peer_id not in self._members():  # others do not give it to anybody else
            await asyncio.sleep(DATA_RETRY_S / 5)
        for digest in [*order[start:], *order[:start]]:
            while not self._run.blobs.has(digest):
                try:
                    await self.fetch_shards({digest})
                except (BlobUnavailable, OSError) as error:
                    log.debug("data: %s", error)
                    await asyncio.sleep(DATA_RETRY_S)
