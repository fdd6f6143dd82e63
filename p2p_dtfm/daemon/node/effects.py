"""What the agreement asks of a member that trains: to stop, take over, come back, or leave."""

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from typing import Any

from p2p_dtfm import __version__
from p2p_dtfm.core.audit.explained_speeds import doubted
from p2p_dtfm.core.consensus.actions import (
    Disagreed,
    Left,
    Rejoin,
    StopStep,
    TakeOver,
    TakeSides,
    ViewAgreed,
    WentBack,
)
from p2p_dtfm.core.planner.recomputation import problem_in_force
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.facts.in_words import counted
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.recovery.contradictions import agreed_states
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.acquaintances import NOBODY_ANSWERS
from p2p_dtfm.daemon.node.coming_and_going.departure import Departure
from p2p_dtfm.daemon.node.coming_and_going.entry import Entry
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.telemetry.problems import BARRED
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.net.errors import Unreachable
from p2p_dtfm.ports import disk, now

HISTORY_LIMIT = 256
DISAGREEMENTS_KEPT = 16
WENT_BACK_KEPT = 16
LIFE_RETRY_S = 5.0
SIGNED_POLL_S = 1.0

log = logging.getLogger("p2p_dtfm")


class Effects:
    """Handlers of a participant's `action_loop`."""

    def __init__(self, participant: Participant, entry: Entry, departure: Departure) -> None:
        self._participant = participant
        self._entry = entry
        self._departure = departure
        self._membership = membership = participant.membership
        self._local = participant.local
        self._messenger = participant.network.messenger
        membership.actions.handle(
            {
                StopStep: self._stop_step,
                TakeSides: self._take_sides,
                ViewAgreed: self._agreed,
                TakeOver: self._take_over,
                Rejoin: lambda action: self._local.life.spawn(self._rejoin(action)),
                Left: self._left,
                Disagreed: self._disagreed,
            }
        )

    def _stop_step(self, action: StopStep) -> None:
        self._local.status.say(State.WAITING, "a failure: the members agree on how to go on")
        self._local.observer.fault("a failure: the step under way has stopped")
        self._membership.recovery_marks.stopped()
        self._participant.trainer.stop_step()
        self._participant.network.evidence.set()

    def _take_sides(self, action: TakeSides) -> None:
        """Say which doubted members hold up this peer too, at once, before all have agreed."""
        membership, now_ns = self._membership, now.monotonic_ns()
        agreement = membership.agreement
        found = self._participant.step_watch.take_sides(agreement)
        membership.actions.do(agreement.hold_up({it.peer_id: it.reason for it in found}, now_ns))

    def _left(self, action: Left) -> None:
        """Write the history down. A peer that comes back later then says with whom the run went on,
        and not that it was among them."""
        self._write_history()
        self._departure.leave_now()

    def _agreed(self, action: ViewAgreed) -> None:
        view = action.view
        self._learn_addresses(view)
        log.info(
            "agreed on view %s: plan %s, %s",
            view.id,
            view.plan.digest()[:12],
            counted(len(view.members), "member"),
        )
        self._participant.trainer.view_agreed(view, action.discard)

    def _learn_addresses(self, view: View) -> None:
        """Learn where the members are. A peer that is yet to join comes by itself. It has still to
        show that its addresses are its own, by taking its place."""
        present = self._membership.agreement.view
        for record in view.snapshot.records:
            if present is None or record.peer_id in present.member_ids:
                self._messenger.learn(record.peer_id, record.addresses)
            else:
                self._messenger.hear_of(record.peer_id, record.addresses)

    def _take_over(self, action: TakeOver) -> None:
        participant, membership = self._participant, self._membership
        view, step, life = action.view, action.step, self._local.life
        self._learn_addresses(view)
        self._messenger.forget_gone(membership.acquainted())
        observer, status = self._local.observer, self._local.status
        entry = _history_entry(action)
        participant.views = [*participant.views, entry][-HISTORY_LIMIT:]
        participant.events.write("view", **entry, **membership.recovery_marks.take())
        if action.went_back is not None:
            self._went_back(action.went_back, view.id.number)
        life.spawn(membership.acquaintances.remember(view))
        if action.restart is not None:
            participant.transcript.rolled_forward(action.restart, step - 1)
            participant.checkpoints.agree(step - 1, agreed_states(action.restart.prepared))
        participant.transcript.took_over(view, step)
        observer.view_took_over(membership.run.spec, view, step)
        self._write_history()
        life.spawn(self._write_once_all_are_in(view))
        log.info("view %s from step %d on", view.id, step)
        for text in _remarks(action):
            self._local.tell(text)
        if isinstance(view.plan, NoPlan) and not participant.trainer.stays_done(view, step):
            status.say(State.WAITING, view.plan.reason)
            log.info("waiting: %s", view.plan.reason)
        elif status.state in (State.MEASURING, State.JOINING):
            status.say(State.SYNCING, f"takes its place in view {view.id.number}")
        status.troubles.over(NOBODY_ANSWERS)
        status.troubles.over(BARRED)
        for peer_id in sorted(membership.agreement.watched):  # in a large view, the neighbours only
            life.spawn(self._connect(peer_id))
        participant.step_watch.took_over(view, step)
        membership.plan_times.took_over(view)
        participant.device_pace.took_over()
        lineage = membership.agreement.recovery_evidence.lineage
        participant.checkpoints.goes_on_from(step, lineage.at)
        participant.trainer.take_over(view, step, action.ledger, action.restart, action.replay)
        if life.leaving.is_set():
            self._departure.leave_now_or_ask()

    def _went_back(self, what: WentBack, view_number: int) -> None:
        """Take back what a liar has done. It is said once, and nothing is kept that could be
        started from again."""
        participant, lineage = (
            self._participant,
            self._membership.agreement.recovery_evidence.lineage,
        )
        self._local.tell(went_back_text(what), logging.WARNING)
        participant.trainer.history.takes_back(what.to_step)
        self._local.observer.seen.undone_count += what.from_step - what.to_step
        told = {"from_step": what.from_step, "step": what.to_step, "peers": list(what.peers)}
        all_of_it = what.is_far_enough
        participant.events.write("went back", **told, all_of_it=all_of_it, view=view_number)
        self._local.status.facts["went_back"] = [
            *self._local.status.facts.get("went_back", ()),
            {**told, "text": went_back_text(what)},
        ][-WENT_BACK_KEPT:]
        self._local.life.spawn(participant.checkpoints.take_back(what.to_step, lineage.digest))

    def _write_history(self) -> None:
        """Write down the views from which this peer comes, and no others: a later start must know
        them."""
        history = self._membership.view_history
        agreement = self._membership.agreement
        history.keep(agreement.history, agreement.bars, agreement.signatures)
        self._local.life.spawn(asyncio.to_thread(history.write))

    async def _write_once_all_are_in(self, view: View) -> None:
        """Write the history again once all members have said that they are in the view: they say so
        only after the first write."""
        agreement = self._membership.agreement
        while agreement.view is view and not agreement.is_taken_over_by_all:
            await asyncio.sleep(SIGNED_POLL_S)
        if agreement.view is view:
            self._write_history()

    async def _connect(self, peer_id: str) -> None:
        try:
            await self._messenger.connect(peer_id)
        except Unreachable as error:
            log.warning("%s", error)

    async def _rejoin(self, action: Rejoin) -> None:
        """Come back as a newcomer, because the others went on without this peer. Its work is
        kept."""
        trainer = self._participant.trainer
        why = "; ".join(filter(None, (action.reason, self._local.life.standstill.lately())))
        log.warning("rejoins: %s", why)
        self._local.status.say(State.JOINING, f"rejoins: {why}")
        self._write_history()
        trainer.stop_step()
        if action.gives_up_steps:
            await self._set_aside()
        trainer.leave_views()
        self._local.observer.left_views()
        leaving = self._local.life.leaving
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(action.pause_ns / 1e9):
                await leaving.wait()
        if leaving.is_set() and not action.is_needed:  # the peer was told to leave meanwhile
            self._departure.leave_now()
            return
        if (life := await self._next_life()) is None:
            self._departure.leave_now()
            return
        self._membership.begin_life(life)
        await self._entry.join()

    async def _set_aside(self) -> None:
        """Keep what this side of a split swarm has done, and tell the user: the other side
        counts."""
        participant, agreement = self._participant, self._membership.agreement
        step, lineage = agreement.step, agreement.recovery_evidence.lineage.digest
        states = participant.trainer.states
        path = await participant.checkpoints.set_aside(states, step, lineage)
        where = f"its layers are kept in {path}" if path else "it had no state to keep"
        text = f"gives up what this side of a split swarm came to by step {step}; {where}"
        self._local.tell(text, logging.WARNING)
        participant.events.write("given up", step=step, kept=str(path or ""))

    async def _next_life(self) -> int | None:
        """The number of the next life, once the disk has it. Without a number on disk that grows, a
        later start could speak as an earlier one. None: the disk does not take one, and this peer
        is told to leave."""
        status, leaving = self._local.status, self._local.life.leaving
        while True:
            try:
                life = self._local.home.next_life()
                status.troubles.over("life")
                return life
            except OSError as error:
                what = f"this start cannot be noted in the home: {error.strerror or error}"
                fix = "free space on that disk, or make it writable"
                status.say(State.WAITING, f"{what}; {fix}")
                status.troubles.tell("life", what, fix)
                if leaving.is_set():
                    return None
                await asyncio.sleep(LIFE_RETRY_S)

    def _disagreed(self, action: Disagreed) -> None:
        """Keep the snapshot that others planned differently. The newest few are enough to find out
        why."""
        number = action.snapshot.number % DISAGREEMENTS_KEPT
        path = self._local.home.root / f"disagreement-{number}.msgpack"
        text = f"{action.reason}. This peer runs version {__version__}: compare it with theirs"
        try:
            disk.write_whole(path, encode(action.snapshot))
            text += f"; what was planned is in {path}"
        except OSError as error:
            log.warning("a disagreement cannot be written down: %s", error)
        self._local.tell(text, logging.WARNING)


def went_back_text(what: WentBack) -> str:
    who = ", ".join(what.peers)
    verb = "was" if len(what.peers) == 1 else "were"
    text = f"went back from step {what.from_step} to {what.to_step}: {who} {verb} barred"
    if not what.is_far_enough:
        text += "; no older state was kept, and what is wrong before stays"
    return text


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
        return entry
    held = {
        stage.peer_id: [stage.first_layer, stage.end_layer]
        for pipeline in view.plan.pipelines
        for stage in pipeline.stages
        if not stage.stands_in
    }
    entry["layers"] = [held.get(peer_id) for peer_id in view.member_ids]
    if view.plan.stand_ins:
        entry["stand_ins"] = sorted(view.plan.stand_ins)
    elif view.plan.provisional:
        entry["provisional"] = True
    return entry


def _remarks(action: TakeOver) -> Iterator[str]:
    """What somebody who watches should know of a view."""
    view, replay = action.view, action.replay
    if replay is not None:
        kept, redone = replay.kept_forwards, replay.redone_forwards
        kept_text = f"{counted(kept, 'microbatch')} kept where computed"
        yield f"of step {action.step}: {kept_text}, {redone:,} redone"
    if view.cut_pace is not None:
        every = counted(view.cut_pace.every_steps, "step")
        cost = counted(view.cut_pace.may_repeat_steps, "step")
        copies = f"guardians get copies every {every} or more, beside training"
        yield f"{copies}; a failure may cost up to {cost}"
    if isinstance(view.plan, Plan) and view.snapshot.planned:
        for peer_id in doubted(view.plan, view.snapshot, problem_in_force):
            yield (
                f"steps were as late as if {peer_id} were no faster than most: it gets as much to "
                "do as if it were so"
            )
    if view.unguarded:
        layers = ", ".join(map(str, view.unguarded))
        yield f"nobody has room to guard layers {layers}: one peer alone holds each of them"
    if isinstance(view.plan, Plan) and view.plan.stand_ins:
        names = ", ".join(sorted(view.plan.stand_ins))
        yield f"until the next plan, {names} computes in two pipelines"
    elif isinstance(view.plan, Plan) and view.plan.provisional:
        yield "goes on at once with who has the states; a better plan is made meanwhile"
