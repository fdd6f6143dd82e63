"""Membership of views: being let in, doing what the agreement asks for, and leaving."""

import asyncio
import itertools
import logging
import time
from collections.abc import Iterator
from typing import Any

from p2p_dtfm import __version__
from p2p_dtfm.core.consensus.actions import (
    Actions,
    ComputePlan,
    Disagreed,
    Left,
    Rejoin,
    Report,
    SendMessage,
    StopStep,
    TakeOver,
    ViewAgreed,
)
from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import decode, encode
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member, Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.acquaintances import (
    LOOK_AGAIN_LIMIT_S,
    LOOK_AGAIN_S,
    NOBODY_ANSWERS,
    Acquaintances,
)
from p2p_dtfm.daemon.peers.wire import KnownPeers
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.errors import Unreachable

log = logging.getLogger("p2p_dtfm")

TICK_S = 0.1
DATA_RETRY_S = 5.0
LINKS_WAIT_S = 8.0
FOUNDS_AFTER_S = 4 * LOOK_AGAIN_S
"""Once a pause between two looks in vain has grown to this, who may found goes on alone."""
JOIN_RETRY_S = 1.0
REMIND_EVERY = 2
"""Of these pauses, while an agreed view is waited for."""
HISTORY_LIMIT = 256
DISAGREEMENTS_KEPT = 16
LEAVE_LIMIT_S = 60.0
"""How long a peer with the only copy of a layer waits for others to be enough to train."""


class Membership(Acquaintances):
    """Turns the actions of `core.consensus.agreement` into calls."""

    async def _found_loop(self) -> None:
        """Wait for the expected newcomers, for a bounded time; then make the first view."""
        agreement, expected = self._agreement, self.settings.expect_peers
        assert agreement is not None
        end_s = time.monotonic() + self.settings.expect_wait_s
        while len(agreement.joiners) + 1 < expected and time.monotonic() < end_s:
            present = len(agreement.joiners) + 1
            self.status.say(State.WAITING, f"{present} of {expected} expected peers are here")
            await asyncio.sleep(TICK_S)
        end_s = min(end_s, time.monotonic() + LINKS_WAIT_S)
        while not links_are_measured(agreement.joiners) and time.monotonic() < end_s:
            self.status.say(State.WAITING, "the newcomers measure the links between them")
            await asyncio.sleep(TICK_S)
        self._do(agreement.found(time.monotonic_ns()))

    async def _join_loop(self) -> None:
        """Ask members to be let in until there is a view with this peer."""
        agreement = self._agreement
        assert agreement is not None
        silent: set[str] = set()
        turn, pause_s = 0, LOOK_AGAIN_S
        while agreement.view is None:
            if not agreement.attempting and agreement.next_view is None:
                members = [peer for peer in self._may_let_in(agreement) if peer not in silent]
                if members:
                    member = members[turn % len(members)]
                    turn += 1
                    self.status.say(State.JOINING, f"asks {member} to be let in at the next view")
                    if await self._ask_to_be_let_in(member, agreement):
                        pause_s = LOOK_AGAIN_S
                    else:
                        silent.add(member)
                        continue
                else:
                    silent.clear()
                    if not await self._find_others(agreement, pause_s):
                        pause_s = min(2 * pause_s, LOOK_AGAIN_LIMIT_S)
            elif agreement.next_view is not None and not agreement.attempting:
                turn += 1
                await self._say_that_it_waits(agreement.next_view, turn, agreement)
            await asyncio.sleep(JOIN_RETRY_S)

    async def _say_that_it_waits(self, view: View, turn: int, agreement: Agreement) -> None:
        """The members may have given up the agreed view since, as after a silence of this peer; it
        would wait for as long as any transfer may take. They take no notice where they have not."""
        members = [peer_id for peer_id in view.member_ids if peer_id != self._me.peer_id]
        if members and turn % REMIND_EVERY == 0:
            await self._ask_to_be_let_in(members[turn // REMIND_EVERY % len(members)], agreement)

    def _may_let_in(self, agreement: Agreement) -> list[str]:
        """Who may be a member: those heard last come first. It may be nobody."""
        known = {
            self._asked_first,
            self._welcomed_by,
            *self._messenger.known,
            *agreement.known_peers,
        }
        known -= {"", self._me.peer_id}
        heard_s = self._messenger.heard_s
        return sorted(
            known,
            key=lambda peer: (peer != self._asked_first, -heard_s.get(peer, 0.0), peer),
        )

    async def _find_others(self, agreement: Agreement, pause_s: float) -> bool:
        """None of those that are known answers: look in all places again. Whether somebody was
        found; if nobody was, a pause lies behind."""
        assert self._run is not None
        self._messenger.passed_over.clear()  # it may have been for the moment
        await self._call_again(self._memory)
        found = await self._look_for_members(self._run.digest)
        if found is not None:
            self._welcomed_by = found.peer_id
            named = (peer.peer_id for peer in found.welcome.peers)
            agreement.familiar.meet((found.peer_id, *named))
            for peer in found.welcome.peers:
                self._messenger.learn(peer.peer_id, peer.addresses)
            return True
        if self._may_go_on_alone and not self.views and pause_s >= FOUNDS_AFTER_S:
            await self._go_on_alone(agreement)
            return False
        self._say_nobody_answers(self._run.digest, pause_s)
        end_s = time.monotonic() + pause_s
        while time.monotonic() < end_s and agreement.view is None and not agreement.attempting:
            await asyncio.sleep(TICK_S)
        return False

    async def _go_on_alone(self, agreement: Agreement) -> None:
        """Those that were found when this peer came back have died before they let it in."""
        if not self._founds:  # else it has begun to, and could not end it yet
            log.warning("goes on alone: nobody that it found when it came back answers any more")
            self._founds = True
            await self._resume_from_checkpoint()
            self._spawn(self._reunion_loop())
        if agreement.view is None and not agreement.attempting and agreement.next_view is None:
            self._do(agreement.found(time.monotonic_ns()))

    async def _ask_to_be_let_in(self, member: str, agreement: Agreement) -> bool:
        """Whether it answered, and may do so; else it is of no use now."""
        try:
            reply = await self._messenger.ask(member, agreement.wants_view())
            known = decode(reply, KnownPeers)
            self._learn_known(known)
            if agreement.familiar.holds(member):
                agreement.familiar.meet(peer.peer_id for peer in known.peers)
        except (Unreachable, PeerFault) as error:
            log.debug("not let in yet: %s", error)
            return isinstance(error, PeerFault) and not isinstance(error, Unreachable)
        return known.lets_in

    def _learn_known(self, known: KnownPeers) -> None:
        """What the member that this peer has asked says of others."""
        for peer in known.peers:
            self._messenger.learn(peer.peer_id, peer.addresses)
        self._waiting_too = tuple(peer.peer_id for peer in known.waiting)
        for other in known.waiting:
            self._host.calling.seen_by_another(other.peer_id, other.seen_host)
            self._messenger.hear_of(other.peer_id, other.addresses)

    def _do(self, actions: Actions) -> None:
        assert self._agreement is not None and self._trainer is not None
        for action in actions:
            if isinstance(action, SendMessage):
                for peer_id in action.to:
                    self._messenger.tell(peer_id, action.message)
            elif isinstance(action, ComputePlan):
                self._spawn(self._compute_plan(action.snapshot))
            elif isinstance(action, StopStep):
                self.status.say(State.WAITING, "a failure: the members agree on how to go on")
                self.observer.fault("a failure: the step under way has stopped")
                self._trainer.stop_step()
                self._take_sides()
            elif isinstance(action, ViewAgreed):
                self._on_agreed(action)
            elif isinstance(action, TakeOver):
                self._on_take_over(action)
            elif isinstance(action, Rejoin):
                self._spawn(self._rejoin(action))
            elif isinstance(action, Left):
                self._trainer.leave_views()
                self._left.set()
            elif isinstance(action, Disagreed):
                self._on_disagreed(action)
            elif isinstance(action, Report):
                log.info("%s", action.text)
                self.observer.note(action.text)

    def _take_sides(self) -> None:
        """At once, before all have agreed: say who holds up this peer, too, of those of whom one
        accuses the other."""
        agreement = self._agreement
        assert agreement is not None and self._step_watch is not None
        now_ns = time.monotonic_ns()
        for suspicion in self._step_watch.take_sides(agreement):
            self._do(agreement.holds_up(suspicion.peer_id, suspicion.reason, now_ns))

    async def _compute_plan(self, snapshot: Snapshot) -> None:
        assert self._agreement is not None
        plan = await asyncio.to_thread(compute_plan, snapshot)
        self._do(self._agreement.plan_computed(snapshot, plan, time.monotonic_ns()))

    def _on_agreed(self, action: ViewAgreed) -> None:
        assert self._trainer is not None
        view = action.view
        for record in view.snapshot.records:
            self._messenger.learn(record.peer_id, record.addresses)
        log.info(
            "agreed on view %s: plan %s, %d members",
            view.id,
            view.plan.digest()[:12],
            len(view.members),
        )
        self._trainer.view_agreed(view, action.discard)

    def _on_take_over(self, action: TakeOver) -> None:
        assert self._trainer is not None
        view, step = action.view, action.step
        entry = _history_entry(action)
        self.views = [*self.views, entry][-HISTORY_LIMIT:]
        self._events.write("view", **entry)
        self._remember_members()
        self.observer.view_took_over(view, step)
        if self._view_history is not None and self._agreement is not None:
            self._view_history.keep(self._agreement.history)
            self._spawn(asyncio.to_thread(self._view_history.write))
        log.info("view %s from step %d on", view.id, step)
        for text in _remarks(action):
            log.info("%s", text)
            self.observer.note(text)
        if isinstance(view.plan, NoPlan):
            self.status.say(State.WAITING, view.plan.reason)
            log.info("waiting: %s", view.plan.reason)
        elif self.status.state in (State.MEASURING, State.JOINING):
            self.status.say(State.SYNCING, f"takes its place in view {view.id.number}")
        self.status.troubles.over(NOBODY_ANSWERS)
        for peer_id in view.member_ids:
            self._spawn(self._connect(peer_id))
        assert self._step_watch is not None
        self._step_watch.took_over(view, step)
        self._plan_times.took_over(view)
        self._device_pace.took_over()
        self._trainer.take_over(view, step, action.ledger, action.restart, action.replay)
        if self._leaving.is_set():
            self._leave_now_or_ask()

    async def _rejoin(self, action: Rejoin) -> None:
        """The others went on without this peer: keep its work, and come back as a newcomer."""
        trainer, agreement, reason = self._trainer, self._agreement, action.reason
        assert trainer is not None and agreement is not None and self._run is not None
        log.warning("rejoins: %s", reason)
        self.status.say(State.JOINING, f"rejoins: {reason}")
        trainer.stop_step()
        if action.gives_up_steps:
            await self._set_aside(agreement)
        trainer.leave_views()
        await asyncio.sleep(action.pause_ns / 1e9)
        self._life = await self._next_life()
        self._me = Member(self._me.peer_id, self._life)
        self._self_record.begin_life(self._me)
        record, signed = self._self_record.make(self._host.identity.sign)
        agreement.begin_life(record, signed)
        await self._join_loop()

    async def _set_aside(self, agreement: Agreement) -> None:
        """The other side of a split swarm counts; what this one has done is kept and told."""
        assert self._trainer is not None and self._checkpoints is not None
        step, lineage = agreement.step, agreement.recovery_evidence.lineage.digest
        path = await self._checkpoints.set_aside(self._trainer.states, step, lineage)
        where = f"its layers are kept in {path}" if path else "it had no state to keep"
        text = f"gives up what this side of a split swarm came to by step {step}; {where}"
        log.warning("%s", text)
        self._events.write("given up", step=step, kept=str(path or ""))
        self.observer.note(text)

    async def _next_life(self) -> int:
        """Without a number on disk that grows, a later start could speak as an earlier one."""
        while True:
            try:
                life = self.home.next_life()
                self.status.troubles.over("life")
                return life
            except OSError as error:
                what = f"its life cannot be written down: {error.strerror or error}"
                fix = "free space on that disk"
                self.status.say(State.WAITING, f"{what}; {fix}")
                self.status.troubles.tell("life", what, fix)
                await asyncio.sleep(DATA_RETRY_S)

    async def _connect(self, peer_id: str) -> None:
        try:
            await self._messenger.connect(peer_id)
        except Unreachable as error:
            log.warning("%s", error)

    def _on_disagreed(self, action: Disagreed) -> None:
        """Keep what the others planned differently; the newest few are enough to find out why."""
        number = action.snapshot.number % DISAGREEMENTS_KEPT
        path = self.home.root / f"disagreement-{number}.msgpack"
        text = f"{action.reason}. This peer runs version {__version__}: compare it with theirs"
        try:
            path.write_bytes(encode(action.snapshot))
            text += f"; what was planned is in {path}"
        except OSError as error:
            log.warning("a disagreement cannot be written down: %s", error)
        log.warning("%s", text)
        self.observer.note(text)

    def _leave_now_or_ask(self) -> None:
        """Leave at once where nobody depends on this peer; else ask for a view without it."""
        assert self._agreement is not None
        view = self._agreement.view
        if view is None or len(view.members) == 1:
            self._leave_now()
            return
        self._set_record(Intent.LEAVING)
        self._do(self._agreement.tick(time.monotonic_ns()))

    def _leave_now(self) -> None:
        assert self._trainer is not None
        self._trainer.leave_views()
        self._left.set()

    def _leave_at_last(self) -> None:
        """No steps happen, so nobody takes over what only this peer has: it is on its disk."""
        view = self._agreement.view if self._agreement is not None else None
        if not self._leaving.is_set() or view is None or not isinstance(view.plan, NoPlan):
            self._leaves_without_plan_s = None
            return
        now_s = time.monotonic()
        if self._leaves_without_plan_s is None:
            self._leaves_without_plan_s = now_s
        elif now_s - self._leaves_without_plan_s > LEAVE_LIMIT_S and not self._left.is_set():
            log.warning("leaves with the only copy of some layers; its checkpoint has them")
            self._leave_now()


def links_are_measured(records: tuple[PeerRecord, ...]) -> bool:
    """Whether one end at least of each pair has measured the link between them."""
    return all(
        right.peer_id in left.links or left.peer_id in right.links
        for left, right in itertools.combinations(records, 2)
    )


def _history_entry(action: TakeOver) -> dict[str, Any]:
    """What the history keeps of a view."""
    view, replay = action.view, action.replay
    entry: dict[str, Any] = {
        "view": view.id.number,
        "snapshot": view.id.snapshot,
        "plan": view.plan.digest(),
        "members": list(view.member_ids),
        "step": action.step,
    }
    if view.cut_pace is not None:
        entry["may_repeat_steps"] = view.cut_pace.may_repeat_steps
    if replay is not None:
        entry["kept_microbatches"] = replay.kept_forwards
        entry["redone_microbatches"] = replay.redone_forwards
    if isinstance(view.plan, NoPlan):
        entry["no_plan"] = view.plan.reason
    elif view.plan.stand_ins:
        entry["stand_ins"] = sorted(view.plan.stand_ins)
    elif view.plan.provisional:
        entry["provisional"] = True
    return entry


def _remarks(action: TakeOver) -> Iterator[str]:
    """What somebody who watches should know of a view."""
    view, replay = action.view, action.replay
    if replay is not None:
        kept, redone = replay.kept_forwards, replay.redone_forwards
        kept_text = f"{kept} microbatches are kept at their stages, {redone} redone"
        yield f"of step {action.step}, {kept_text}"
    if view.cut_pace is not None:
        yield (
            f"guardians get copies every {view.cut_pace.every_steps} steps or more, beside "
            f"training; a failure may cost up to {view.cut_pace.may_repeat_steps} steps"
        )
    if view.unguarded:
        layers = ", ".join(map(str, view.unguarded))
        yield f"nobody has room to guard layers {layers}: one peer alone holds each of them"
    if isinstance(view.plan, Plan) and view.plan.stand_ins:
        names = ", ".join(sorted(view.plan.stand_ins))
        yield f"until the next plan, {names} computes in two pipelines"
    elif isinstance(view.plan, Plan) and view.plan.provisional:
        yield "goes on at once with who has the states; a better plan is made meanwhile"
