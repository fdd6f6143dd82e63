"""What a daemon does all the time beside training: heartbeats, presence, measurements, data."""

import asyncio
import collections
import contextlib
import logging

from p2p_dtfm.core.audit.believed_speeds import pace_of, seen_slower
from p2p_dtfm.core.audit.roles import comes_of_age
from p2p_dtfm.core.gate.gate_table import FAR
from p2p_dtfm.core.messages.agreement_messages import Heartbeat
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.machine.disk import keep_under
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.membership import TICK_S
from p2p_dtfm.daemon.node.participant import Participant
from p2p_dtfm.daemon.peers.facts.publishing import Publishing
from p2p_dtfm.daemon.peers.facts.twin import require_no_twin
from p2p_dtfm.daemon.peers.guests.guest_watch import GuestWatch
from p2p_dtfm.daemon.peers.self_record import LinkNews
from p2p_dtfm.daemon.proof.of_others import StepsOfOthers
from p2p_dtfm.daemon.telemetry.plan_times import SLOW_PERCENT
from p2p_dtfm.daemon.telemetry.seen_paces import pace_text, pause_s
from p2p_dtfm.net.contacts.addresses import is_relayed
from p2p_dtfm.net.directory.values import Presence
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.streams.blobs import BlobUnavailable
from p2p_dtfm.ports import chance, now

log = logging.getLogger("p2p_dtfm")

TICK_NS = round(TICK_S * 1e9)
LEAST_REST_NS = 10_000_000
"""However much is due, this loop leaves the others so long."""
DATA_KEPT_LIMIT_BYTES = 2 << 30
DATA_RETRY_S = 5.0
REPLAN_INTERVAL_S = 60.0
"""A peer asks for a new plan because of links at most this often; others' requests count apart.
Of links that were measured before, and are others now, so long a view is planned well enough,
whoever asked for it: on a machine with several daemons they change with each of its moods."""
STRANGERS_TRIED = 4
PRESENCE_REFRESH_S = 20.0
PRESENCE_RETRY_S = 3.0
"""Nodes that were asked first may have had to look for the run."""
CROWD = 8
"""A view of so many looks half as often for others, of twice as many a third as often."""
WAY_REFRESH_S = 5.0
WAY_RETRY_S = 1.0
RECORD_REFRESH_S = 1.0
REPLAN_QUIET_S = 5.0
"""How long this peer's own facts must be unchanged before they are worth a new plan."""


class Background:
    """Loops that run from when this peer takes part until it ends."""

    def __init__(self, participant: Participant, departure: Departure) -> None:
        self._participant = participant
        self._departure = departure
        self._membership = membership = participant.membership
        self._agreement = membership.agreement
        self._do = membership.actions.do
        self._me = membership.network.me.peer_id
        self._run = membership.run
        self._local = participant.local
        self._network = network = participant.network
        self._messenger = network.messenger
        self._liveness = network.liveness
        self._moved = asyncio.Event()
        """This peer's addresses are others than those in its presence."""
        self._replanned_s = -REPLAN_INTERVAL_S
        self._doubted: frozenset[str] = frozenset()
        """Who is in doubt by others' word, and so was called."""
        self._replans_view: View | None = None
        self._replans_view_since_s = 0.0
        """The view in force, and since when this loop has seen it."""
        self._publishing = Publishing(
            membership.acquaintances.directory,
            self._run.digest,
            participant.local.settings.publish and not self._run.spec.admission.is_invited,
        )
        self._placed_s = 0.0
        self._worked_s = now.monotonic_s()
        """When this peer had a stage last."""
        self._times_slow = 0
        """How often its device was seen to be slower than when it was measured."""
        self._presences = 0
        self._began_s = now.monotonic_s()
        self._places_of: View | None = None
        self._gives_for: View | None = None
        self._given_before: collections.Counter[str] = collections.Counter()

    def begin(self) -> None:
        """Start all loops."""
        local, membership = self._local, self._membership
        acquaintances, trainer = membership.acquaintances, self._participant.trainer
        local.life.spawn(membership.actions.run())
        local.life.spawn(self._tick_loop())
        local.life.spawn(self._reachability_loop())
        local.life.spawn(self._presence_loop())
        local.life.spawn(acquaintances.keep_remembering(self._agreement))
        if membership.founds:
            local.life.spawn(acquaintances.look_for_the_lost(self._agreement))
        if local.disk_limit_bytes:
            directory = local.home.run_directory(self._run.digest)
            local.life.spawn(keep_under(local.home.root, directory, local.disk_limit_bytes))
        if (book := self._network.guest_book) is not None:
            watch = GuestWatch(book, self._agreement, self._messenger, self._do)
            local.life.spawn(watch.keep())
        local.life.spawn(self._record_loop())
        local.life.spawn(self._data_loop())
        local.life.spawn(self._timeline_loop())
        local.life.spawn(self._learn_of_earlier_steps())
        local.life.spawn(trainer.run())

    async def _learn_of_earlier_steps(self) -> None:
        """Who computed them; it waits until this peer takes part."""
        given = self._participant.contributions
        steps = StepsOfOthers(self._messenger, self._run.spec, given)
        evidence = self._agreement.recovery_evidence
        await steps.learn(self._others, lambda: evidence.lineage)
        self._local.observer.tallies(given)

    def _others(self) -> list[str]:
        view = self._agreement.view
        return [it for it in view.member_ids if it != self._me] if view is not None else []

    async def _tick_loop(self) -> None:
        while True:
            await self._rest()
            self._local.life.standstill.look()
            now_ns = now.monotonic_ns()
            self._agreement.has_saved(self._participant.checkpoints.saved)
            self._beat(now_ns)
            self._do(self._agreement.tick(now_ns))
            self._departure.leave_at_last()

    async def _rest(self) -> None:
        """Until the next tick, but for judging at once what falls due before it: whether a peer
        has ended the others decide in several turns, and each would wait for half a tick."""
        evidence, ends_ns = self._network.evidence, now.monotonic_ns() + TICK_NS
        while (now_ns := now.monotonic_ns()) < ends_ns:
            due_ns = self._liveness.due_ns(now_ns)
            wakes_ns = ends_ns if due_ns is None else min(ends_ns, max(due_ns, now_ns))
            if wakes_ns > now_ns:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout((wakes_ns - now_ns) / 1e9):
                        await evidence.wait()
            evidence.clear()
            if (now_ns := now.monotonic_ns()) < ends_ns:
                self._beat_early(now_ns)
                await asyncio.sleep(min(LEAST_REST_NS, ends_ns - now_ns) / 1e9)

    def _beat_early(self, now_ns: int) -> None:
        """What `_beat` does of it between two ticks."""
        for suspicion in self._liveness.tick_early(now_ns):
            self._do(self._agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        self._call_doubted()
        self._say_that_it_lives(now_ns)

    async def _timeline_loop(self) -> None:
        """While a page is open, show it a late step of this peer's pipeline."""
        agreement = self._agreement
        await self._network.traces.keep_timeline(
            lambda: agreement.view,
            lambda: self._local.dashboard.watched,
            self._local.observer.show_timeline,
        )

    def _beat(self, now_ns: int) -> None:
        """Say that this peer lives, and find out who does not."""
        agreement, step_watch = self._agreement, self._participant.step_watch
        watched = agreement.watched
        view = agreement.view
        fellows = len(view.members) - 1 if view is not None else None
        self._liveness.watch(watched, now_ns, fellows)
        for suspicion in self._liveness.tick(now_ns):
            self._do(agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        found = step_watch.tick(agreement, {*watched, self._me}, now_ns)
        self._do(agreement.hold_up({it.peer_id: it.reason for it in found}, now_ns))
        self._call_doubted()
        if step_watch.has_news:
            self._liveness.speak_to(watched)
        self._say_that_it_lives(now_ns)

    def _call_doubted(self) -> None:
        doubted = self._agreement.doubted
        self._liveness.speak_to(doubted - self._doubted)
        self._doubted = doubted

    def _say_that_it_lives(self, now_ns: int) -> None:
        agreement, step_watch = self._agreement, self._participant.step_watch
        if due := self._liveness.due_heartbeats(now_ns):
            beat = Heartbeat(
                sender=agreement.me,
                progress=self._progress,
                work=step_watch.work(agreement),
                gives=self._gives(now_ns),
                missed=self._liveness.missed(),
                silent_ms=self._liveness.silent_ms(now_ns),
            )
            for peer_id in due:
                self._messenger.tell(peer_id, beat)

    def _gives(self, now_ns: int) -> dict[str, int]:
        """To whom is to join, since that was agreed on."""
        agreement, given = self._agreement, self._network.blobs.given_bytes
        if agreement.next_view is not self._gives_for:
            self._gives_for, self._given_before = agreement.next_view, given.copy()
        gives = {
            peer_id: given[peer_id] - self._given_before[peer_id] for peer_id in agreement.needy
        }
        gives = {peer_id: size for peer_id, size in gives.items() if size > 0}
        agreement.gives(gives, now_ns)
        return gives

    @property
    def _progress(self) -> int:
        """What this peer has computed and fetched."""
        return self._local.compute.done_count + (self._network.blobs.received_bytes >> 16)

    async def _presence_loop(self) -> None:
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
                    # before this peer's own presence takes the place of another's with its id
                    self._meet_present(await directory.present_peers(self._run.digest))
                accepted = await directory.publish_presence(presence)
                accepted &= await self._publishing.publish(
                    self._membership.self_record,
                    self._membership.sign,
                    self._agreement.view,
                    self._local.observer.step(),
                )
            except Unreachable as error:
                log.warning("directory: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_REFRESH_S if accepted else PRESENCE_RETRY_S):
                    await self._moved.wait()
            self._moved.clear()

    def _looks_around(self) -> bool:
        """Where many know one another, each looks for more of them, and publishes the spec that
        all publish, only now and then."""
        self._presences += 1
        view = self._agreement.view
        members = 0 if view is None else len(view.members)
        return self._presences == 1 or self._presences % (1 + members // CROWD) == 0

    def _meet_present(self, present: list[Presence]) -> None:
        """Others of this run may be in another view; of those that were never in one with this
        peer there may be any number, and so a few are tried each time. Raises `UserError` where one
        has this peer's own id."""
        lived_s = now.monotonic_s() - self._began_s
        identity = self._local.home.identity
        require_no_twin(present, self._membership.me, now.wall_s() - lived_s, identity)
        others = [peer for peer in present if peer.peer_id != self._me]
        roles = {peer.peer_id: self._network.keeper.role_of(peer.peer_id) for peer in others}
        strangers = [peer for peer in others if roles[peer.peer_id] in FAR]
        tried = chance.sample(strangers, min(len(strangers), STRANGERS_TRIED))
        for peer in (*(peer for peer in others if roles[peer.peer_id] not in FAR), *tried):
            self._messenger.hear_of(peer.peer_id, peer.addresses)
            self._agreement.know(peer.peer_id)

    async def _reachability_loop(self) -> None:
        """Tell others when this peer is reached another way, and notice links that lead another
        way: those are measured anew."""
        while not self._network.host.is_only_local:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WAY_REFRESH_S):
                    await self._network.reachability.changed.wait()
            try:
                if self._network.reachability.changed.is_set():
                    addresses = await self._network.host.addresses()  # or it is told of later
                    self._network.reachability.changed.clear()
                    finding = self._network.reachability.finding
                    record = self._membership.self_record
                    record.state_reachability(addresses, finding.reachability)
                    self._membership.set_record()
                    self._moved.set()
                ends = await self._network.host.remote_addresses()
            except Unreachable as error:
                log.debug("%s", error)
                await asyncio.sleep(WAY_RETRY_S)
                continue
            self._network.far_ends = {peer: end for peer, (end, *_) in ends.items()}
            straight = {peer: not is_relayed(end) for peer, end in self._network.far_ends.items()}
            self._membership.self_record.forget_where_changed(straight)

    async def _record_loop(self) -> None:
        """Keep the record up to date: links to peers that turned up later, and live traffic.

        Facts that are news to the view in force are worth a new plan, once things are quiet.
        """
        record, quiet_since_s = self._membership.self_record, now.monotonic_s()
        while not self._local.life.leaving.is_set():
            await asyncio.sleep(RECORD_REFRESH_S)
            newcomers = (joiner.peer_id for joiner in self._membership.joiners())
            candidates = {*self._messenger.known, *newcomers, *self._membership.waiting_too}
            waiting = record.unmeasured(sorted(candidates))
            changed = False
            for peer_id in waiting:
                if await record.probe_one(peer_id, self._messenger):
                    changed = True
                    self._compare_with_estimate(peer_id)
            await self._refresh_place()
            changed = record.learn_from_traffic(self._participant.bulk.link_estimate) or changed
            if record.differs_in_steps(self._membership.plan_times.told()):
                self._membership.set_record()
            if changed:
                self._membership.set_record()
                quiet_since_s = now.monotonic_s()
            self._replan_if_slow()
            if not changed and now.monotonic_s() - quiet_since_s > REPLAN_QUIET_S:
                self._replan_if_news()
                quiet_since_s = now.monotonic_s()

    def _compare_with_estimate(self, peer_id: str) -> None:
        view, link = self._agreement.view, self._membership.self_record.link_to(peer_id)
        if view is not None and link is not None:
            self._membership.estimates.measured_in(view.snapshot, self._me, peer_id, link)

    async def _refresh_place(self) -> None:
        """In a large swarm: another round trip to one of those to whom there is a connection."""
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

    def _replan_if_news(self) -> None:
        """Ask for a view with this peer's present record, if the one in force has an older one."""
        agreement = self._agreement
        view = agreement.view
        if view is None or self._membership.me not in view.members or len(view.members) == 1:
            return
        now_s = now.monotonic_s()
        if view is not self._replans_view:
            self._replans_view, self._replans_view_since_s = view, now_s
        news = self._membership.self_record.news_to(view.snapshot)
        is_of_links = news is LinkNews.CHANGED
        since_s = self._replans_view_since_s if is_of_links else self._replanned_s
        reason = news.value if news is not None else ""
        reason = reason or self._who_is_fast_again(view.snapshot)
        if not reason and comes_of_age(view.snapshot, self._me, agreement.step):
            reason = "a newcomer has followed for long enough"
        if reason and now_s - max(since_s, self._replanned_s) >= REPLAN_INTERVAL_S:
            self._replanned_s = now_s
            self._do(agreement.request_replan(reason, now.monotonic_ns()))

    def _replan_if_slow(self) -> None:
        """Steps take much longer than planned, or than under an earlier plan: what is measured
        goes into this peer's record, and the members plan from it."""
        agreement = self._agreement
        view = agreement.view
        if view is None or self._membership.me not in view.members or len(view.members) == 1:
            return
        is_late = self._membership.plan_times.reason is not None
        self._state_own_pace(view, is_late)
        self._state_paces_of_others(is_late)
        reason = self._membership.plan_times.why_anew()
        if reason is not None:
            self._local.tell(reason)
            self._do(agreement.request_replan(reason, now.monotonic_ns()))

    def _state_own_pace(self, view: View, is_late: bool) -> None:
        """As slow as this device is seen to work while steps are late, and as fast again."""
        record = self._membership.self_record
        if not is_late and record.device is record.measured_device:
            return
        seen = self._participant.device_pace.seen(
            record.measured_device, record.device, view, self._me
        )
        now_s = now.monotonic_s()
        if seen is not None or self._membership.has_stage():
            self._worked_s = now_s
        elif now_s - self._worked_s >= pause_s(self._times_slow):
            seen = record.measured_device  # without work it cannot show that it is faster
        if seen is not None and seen is not record.device:
            self._times_slow += record.device is record.measured_device
            record.state_device(seen)
            self._membership.plan_times.forget(self._me)
            self._membership.set_record()

    def _state_paces_of_others(self, is_late: bool) -> None:
        """Who is slower than it says, as seen here: the plan goes by what most have seen."""
        paces = self._participant.trainer.seen_paces
        paces.look(is_late)
        for peer_id in self._membership.self_record.state_paces(paces.told()):
            log.info("%s", pace_text(peer_id, paces.told().get(peer_id)))
            self._membership.plan_times.forget(peer_id)
            self._membership.set_record()

    def _who_is_fast_again(self, snapshot: Snapshot) -> str:
        """Why the plan in force takes somebody to be slower than it is now; empty: it does not."""
        record = self._membership.self_record
        planned_ns = pace_of(snapshot.record(self._me).device, snapshot.workload)
        if planned_ns * 100 >= SLOW_PERCENT * pace_of(record.device, snapshot.workload):
            return "this device is as fast again as it was"
        paces = self._participant.trainer.seen_paces
        if better := paces.are_better(seen_slower(snapshot)):
            return f"{', '.join(better)} may be as fast again as it says"
        return ""

    async def _data_loop(self) -> None:
        """Bring all data here ahead of need, so that no peer's death takes the only copy along.

        Corpora above the limit stay with those whose steps read them.
        """
        sizes = self._run.manifest.blobs()
        limits = [DATA_KEPT_LIMIT_BYTES, self._local.disk_limit_bytes // 2]
        if sum(sizes.values()) > min(filter(None, limits)):
            return
        order = sorted(sizes)
        start = sum(self._me.encode()) % len(order)  # not all fetch the same one first
        while self._me not in self._membership.members():  # others do not give it to anybody else
            await asyncio.sleep(DATA_RETRY_S / 5)
        for digest in [*order[start:], *order[:start]]:
            while not self._run.blobs.has(digest):
                try:
                    await self._participant.fetch_shards({digest})
                except (BlobUnavailable, OSError) as error:
                    log.debug("data: %s", error)
                    await asyncio.sleep(DATA_RETRY_S)
