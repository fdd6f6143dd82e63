"""Tells those that listen that this peer lives, and finds out which of the others no longer
does."""

import asyncio
import collections
import contextlib

from p2p_dtfm.core.messages.agreement_messages import Heartbeat
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.membership import TICK_S
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.ports import now, rarely

TICK_NS = round(TICK_S * 1e9)
LEAST_REST_NS = 10_000_000
"""However much is due, this loop leaves so long to the daemon's other tasks."""


class Heartbeats:
    """The clock of the agreement and of the watch for failures."""

    def __init__(self, participant: Participant, departure: Departure) -> None:
        self._participant = participant
        self._departure = departure
        membership = participant.membership
        self._agreement = membership.agreement
        self._do = membership.actions.do
        self._me = membership.network.me.peer_id
        self._local = participant.local
        self._network = network = participant.network
        self._messenger = network.messenger
        self._liveness = network.liveness
        self._doubted: frozenset[str] = frozenset()
        """Peers that others doubt, and that this peer has therefore spoken to."""
        self._gives_for: View | None = None
        self._given_before: collections.Counter[str] = collections.Counter()

    async def keep(self) -> None:
        """For as long as the daemon lives."""
        while True:
            await self._rest()
            await rarely.lingers("tick late")
            self._local.life.standstill.look()
            now_ns = now.monotonic_ns()
            self._agreement.set_saved(self._participant.checkpoints.saved)
            self._beat(now_ns)
            self._do(self._agreement.tick(now_ns))
            self._departure.leave_at_last()

    async def _rest(self) -> None:
        """Wait for the next tick, and judge at once what falls due before it. Whether a peer has
        ended is decided by the others in several turns. Without this, each turn would wait for half
        a tick."""
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
        """The part of `_beat` that is done between two ticks."""
        for suspicion in self._liveness.tick_early(now_ns):
            self._do(self._agreement.suspect(suspicion.peer_id, suspicion.reason, now_ns))
        self._call_doubted()
        self._say_that_it_lives(now_ns)

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
        """Bytes given to each peer that is to join, since the view with it was agreed on."""
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
        """What this peer has computed, fetched, and written for others."""
        return self._local.compute.done_count + (self._network.blobs.received_bytes >> 16)
