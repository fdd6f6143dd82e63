"""Leaving in order, before the run's end or with it: nobody loses what only this peer has."""

import asyncio
import contextlib
import logging

from p2p_dtfm.core.liveness.pace import FETCH_BYTES_PER_S
from p2p_dtfm.core.protocol.plan import NoPlan
from p2p_dtfm.core.protocol.records import Intent
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.node.membership import TICK_S
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.ports import now

log = logging.getLogger("p2p_dtfm")

LEAVE_LIMIT_S = 60.0
"""How long a peer whose layers nobody can take over waits until the others are enough to train."""
DONE_WAIT_S = 60.0
"""How long a peer that ends with its run waits for others to have the model, while none of it
travels."""
SAVE_AGAIN_S, LONGEST_REST_S = 2.0, 30.0
"""How often this peer tries again to write the last step to a disk that did not take it: at first,
and at last."""
TELL_AGAIN_S = 20.0
"""How often the others are told again which files of the last step are here."""


class Departure:
    """Asks for a view without this peer, and gives away what others want for."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self._membership = participant.membership
        self._life = participant.local.life
        self._without_steps_s: float | None = None
        self._takes_along = False
        """This peer has left although nobody had taken its layers over."""

    def leave_now_or_ask(self) -> None:
        """Leave at once where nobody depends on this peer, or will soon. Else ask for a view
        without it."""
        membership, agreement = self._membership, self._membership.agreement
        view = agreement.view
        if view is None or (len(view.members) == 1 and agreement.next_view is None):
            self.leave_now()
            return
        membership.set_record(Intent.LEAVING)
        membership.actions.do(agreement.tick(now.monotonic_ns()))

    def leave_now(self) -> None:
        self.participant.trainer.leave_views()
        self._life.left.set()

    def leave_at_last(self) -> None:
        """Leave without a takeover after `LEAVE_LIMIT_S`, where nobody takes this peer's layers
        over. That is so where no steps happen, or where the others want what it has and do not let
        it in. Its layers are on its disk."""
        view = self._membership.agreement.view
        waits = view is None or isinstance(view.plan, NoPlan)
        waits |= self.participant.trainer.waits.stands_still
        if not self._life.leaving.is_set() or not waits:
            self._without_steps_s = None
            return
        now_s = now.monotonic_s()
        if self._without_steps_s is None:
            self._without_steps_s = now_s
        elif now_s - self._without_steps_s > LEAVE_LIMIT_S and not self._life.left.is_set():
            log.warning("leaves with layers that nobody has taken over; its checkpoint has them")
            self._takes_along = True
            self.leave_now()

    async def end(self) -> None:
        """Save what this peer holds and give what was asked for. Nothing depends on it any more."""
        participant, view = self.participant, self._membership.agreement.view
        trainer = participant.trainer
        await trainer.settled()
        step = await self._save()
        if not self._is_held_by_others(view):
            await self._until_kept(step)
        if view is None or view.members:  # else all leave: nobody asks for anything
            await trainer.hand_over()
        log.info("left the swarm")
        participant.local.status.say(State.STOPPED, "left")

    async def save_alone(self) -> None:
        """Save what this peer holds, since it cannot reach the others as it should. Its own tasks
        end first: over direct lines others would hear meanwhile that it lives."""
        log.warning("nothing reaches the others any more: saves what it holds")
        self.participant.trainer.leave_views()
        await self.participant.trainer.settled()
        self._life.cancel_tasks()
        await self._save()

    async def keep_the_model(self) -> bool:
        """Wait for the disk after the last step, as `end` does before it. This peer may be alone
        with the model. Returns whether somebody has it."""
        if self._is_held_by_others(self._membership.agreement.view):
            return True
        return await self._until_kept(self._membership.run.spec.total_steps)

    def _is_held_by_others(self, view: View | None) -> bool:
        """Whether others go on with the states that this peer has had."""
        if view is None or isinstance(view.plan, NoPlan):
            return False
        if self._takes_along:  # the others' own layers are safe with them
            me = self._membership.me.peer_id
            return all({*view.plan.holders(n)} - {me} for n in self.participant.trainer.states)
        return any(it != self._membership.me.peer_id for it in view.member_ids)

    async def _until_kept(self, step: int) -> bool:
        """Try for a while to save what nobody else has and the disk has not taken. The user may
        make room meanwhile. At the end it is said what is lost. Returns whether all is kept."""
        participant, end_s = self.participant, now.monotonic_s() + LEAVE_LIMIT_S
        checkpoints = participant.checkpoints
        if not checkpoints.refused(step):
            return True
        waits = (
            f"step {step} is nowhere else: waits {LEAVE_LIMIT_S:.0f} s at most for room on its disk"
        )
        log.warning("%s; a second signal ends at once", waits)
        participant.local.status.say(State.LEAVING, waits)
        while checkpoints.refused(step) and now.monotonic_s() < end_s:
            await asyncio.sleep(SAVE_AGAIN_S)
            await self._save()
        if is_lost := checkpoints.refused(step):
            kept = checkpoints.whole_step or 0
            log.warning("what was trained from step %d to %d is lost: no disk has it", kept, step)
        return not is_lost

    async def _save(self) -> int:
        """Save the newest states whose lineage is known; returns their step, or 0. A peer that has
        not taken over yet does not know that of the states that it was given, and they may be
        further than its own layers. Without a lineage they would replace a sound checkpoint."""
        states, lineage_at = self.participant.trainer.states, self.participant.lineage_at
        versions = (state.version for state in states.values())
        step = max((it for it in versions if it > 0 and lineage_at(it)), default=0)
        newest = {n: state for n, state in states.items() if state.version == step}
        if step > 0:  # states that it guarded for others may be a step behind
            await self.participant.checkpoints.save(step, newest, lineage_at(step))
        return step

    async def run_ended(self) -> None:
        """After the last step, see that everyone has the whole model, then end if so set. If a
        failure costs the last steps after all, they are computed again before that."""
        done = self.participant.trainer.done
        while True:
            await done.wait()
            await self._share_model()
            if not self.participant.local.settings.exit_when_done:
                await self._until_leaving_or_undone()
            if done.is_set():
                return

    async def _until_leaving_or_undone(self) -> None:
        """Wait until this peer is told to leave, or a failure has cost the last step. Then the
        model is shared once more. Meanwhile its user may make room for what the disk refused, of
        which this peer may have the only copy: it is tried again, also before this peer leaves."""
        done, leaving = self.participant.trainer.done, self._life.leaving
        checkpoints, step = self.participant.checkpoints, self._membership.run.spec.total_steps
        tried_s, rest_s = now.monotonic_s(), SAVE_AGAIN_S
        while done.is_set() and not leaving.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(SAVE_AGAIN_S):
                    await leaving.wait()
            is_time = leaving.is_set() or now.monotonic_s() - tried_s >= rest_s
            if done.is_set() and is_time and checkpoints.refused(step):
                await self._save()
                tried_s, rest_s = now.monotonic_s(), min(2 * rest_s, LONGEST_REST_S)

    async def _share_model(self) -> None:
        """Wait until the others have the model, for a bounded time. The time begins anew while
        files are on their way. A peer that is to leave waits for nobody."""
        participant, done = self.participant, self.participant.trainer.done
        leaving = self._life.leaving
        step, moved = self._membership.run.spec.total_steps, self._moved_bytes()
        tried_s = told_s = now.monotonic_s()
        end_s, longest_s = tried_s + DONE_WAIT_S, tried_s + DONE_WAIT_S + self._sharing_s()
        while done.is_set() and now.monotonic_s() < min(end_s, longest_s):
            if leaving.is_set() or participant.checkpoints.whole_at(step, self._others()):
                return
            await asyncio.sleep(TICK_S)
            if moved != (moved := self._moved_bytes()):
                end_s = now.monotonic_s() + DONE_WAIT_S
            if now.monotonic_s() - tried_s > SAVE_AGAIN_S and self._is_unsaved(step):
                await self._save()  # no later step comes that would try it again
                tried_s = now.monotonic_s()
            if now.monotonic_s() - told_s > TELL_AGAIN_S:  # some were cut off, and missed it
                participant.checkpoints.tell(step)
                told_s = now.monotonic_s()

    def _is_unsaved(self, step: int) -> bool:
        """Whether states in memory are not on this disk. It may have refused them. Or another
        member held these layers in the last step, and may have lost what it had written of them."""
        checkpoints = self.participant.checkpoints
        saved = {n for it in checkpoints.saved if it.version == step for n in it.layers}
        states = self.participant.trainer.states
        held = {layer for layer, state in states.items() if state.version == step}
        return checkpoints.refused(step) or not held <= saved

    def _others(self) -> set[str]:
        view = self._membership.agreement.view
        return set(view.member_ids) - {self._membership.me.peer_id} if view is not None else set()

    def _moved_bytes(self) -> tuple[int, int]:
        """(bytes of files received, bytes given to members). Strangers keep nobody here."""
        blobs = self.participant.network.blobs
        return blobs.received_bytes, sum(blobs.given_bytes[it] for it in self._others())

    def _sharing_s(self) -> float:
        """How long the whole model takes to all others over a thin line. Nobody is waited for any
        longer, whatever is still asked for."""
        workload = self._membership.workload
        size_bytes = sum(workload.cost(n).state_bytes for n in range(workload.layer_count))
        return (1 + len(self._others())) * size_bytes / FETCH_BYTES_PER_S
