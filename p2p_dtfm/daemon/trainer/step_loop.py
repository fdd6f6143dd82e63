"""The steps of a stage-holder in one view: compute, keep, prepare, commit, apply."""

import asyncio
import logging
from collections.abc import Collection, Coroutine
from functools import partial
from typing import Any, NoReturn

from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.messages.audit_messages import Account
from p2p_dtfm.core.messages.prepared import Prepared, Statement, StepOutcome, sign_prepared
from p2p_dtfm.core.planner.recomputation import must_recompute
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.recovery.partial_replay import StageReplay
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.step.mailbox import Mailbox
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StageListeners, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_engine import LocalResult, StepEngine
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.daemon.telemetry.run_history import RunHistory
from p2p_dtfm.daemon.telemetry.status import State
from p2p_dtfm.daemon.trainer.audited.audits import Audits
from p2p_dtfm.daemon.trainer.cut_transfers import Cuts
from p2p_dtfm.daemon.trainer.followers import Followers
from p2p_dtfm.daemon.trainer.place import PlaceInView
from p2p_dtfm.daemon.trainer.step_shards import StepShards, have_shards
from p2p_dtfm.daemon.trainer.trainer_state import Outlet, Stopped, Tensor, Tools, TrainerState
from p2p_dtfm.ports import now, rarely
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import apply_outcome
from p2p_dtfm.train.stage.finite import NotFinite

GUARDIAN_LIMIT_S = 10.0
"""How long a step waits for a guardian that has not got the states; at least two steps."""

log = logging.getLogger("p2p_dtfm")


class StepLoop:
    """`run` raises `Stopped` where a failure ends the view."""

    def __init__(
        self,
        tools: Tools,
        outlet: Outlet,
        state: TrainerState,
        place: PlaceInView,
        followers: Followers,
        cuts: Cuts,
        history: RunHistory,
    ) -> None:
        self.is_applying = False
        """Whether a step is committed and its update under way."""
        self.awaits_receipts = False
        """The step's gradients are there, and guardians are waited for."""
        self._tools = tools
        self._spec = tools.spec
        self._outlet = outlet
        self._state = state
        self._place = place
        self._followers = followers
        self._cuts = cuts
        self._history = history
        self._computing: asyncio.Task[LocalResult] | None = None
        self._work: OpenStepWork | None = None
        self.engine: StepEngine | None = None
        """The engine of the view in which steps are taken."""
        self.audits = Audits(tools, outlet, state, place.offer_states)
        self._terms = terms_of(tools.spec)
        self._diverged_at = -1

    async def run(self, view: View, plan: Plan, mailbox: Mailbox) -> None:
        """Train as long as this peer is in `view`, whose states are here.

        What is computed of the open step outlives the view, if the stage stays the same.
        """
        tools, state = self._tools, self._state
        states = {layer: state.states[layer] for layer in plan.layers_of(tools.me)}
        state.memory.keep_only(states)
        outlet = self._outlet
        lost = partial(self._lost, view)
        frames = StepFrames(mailbox.view, tools.net.bulk, lost, outlet.poison)
        engine = StepEngine(
            StagePlace(plan, tools.me, self._spec, must_recompute(view.snapshot, plan, tools.me)),
            states,
            StageLinks(mailbox, frames),
            StageTools(
                tools.compute, state.memory, tools.batches, tools.recorder, tools.batches.weight
            ),
            StageListeners(outlet.computed, partial(self._reduced_alone, view)),
            self._work_of(states),
        )
        self._work, self.engine = engine.work, engine
        while state.view is view and state.step <= self._spec.total_steps:
            await self._one_step(view, plan, engine)
            await self._outlet.settled()

    def _lost(self, view: View, peer_id: str, cause: str) -> None:
        """A tensor on its way to a peer is lost. Sends outlive their view. What the next one lacks
        of it is sent anew there, so of a view that is over nobody misses anything."""
        if self._state.view is view:
            self._outlet.trouble(peer_id, cause)

    def forget_work_of_others(self, layers: Collection[int]) -> None:
        """Forget the work, unless it is on these very layers."""
        if self._work is not None and set(layers) != self._work.runner.layer_states.keys():
            self.forget_work()

    def _work_of(self, states: dict[int, LayerState]) -> OpenStepWork | None:
        """The work of the view before, if it was done on these very states."""
        work = self._work
        if work is None or work.runner.layer_states.keys() != states.keys():
            return None
        held = work.runner.layer_states
        return work if all(held[layer] is states[layer] for layer in states) else None

    @property
    def computes(self) -> bool:
        """Whether the engine's part of a step is under way."""
        return self._computing is not None

    def forget_work(self) -> None:
        """This peer has no stage any more, or another one: free the memory that its work takes."""
        self._work = self.engine = None

    def stop(self) -> None:
        """Compute nothing more of the step under way."""
        if self._computing is not None:
            self._computing.cancel()

    async def _one_step(self, view: View, plan: Plan, engine: StepEngine) -> None:
        step, spec, recorder = self._state.step, self._spec, self._tools.recorder
        train = step < spec.total_steps
        evaluate = not train or step % spec.evaluation.every_steps == 0
        await rarely.lingers("step late")
        await self._place.offer_states()
        if self._state.is_over(view):  # large states take their time to be written
            raise Stopped
        self.audits.forget()
        if train:
            self._cuts.begin(step, engine.states)
        replay = self._replay(plan, step) or engine.whole
        microbatches = replay.microbatches if train else ()
        shards = StepShards(step, microbatches, held_out=evaluate and engine.evaluates)
        await self._have_shards(view, plan, shards)
        self._tools.status.say(State.TRAINING, f"step {step:,} of {spec.total_steps:,}")
        digests = asyncio.create_task(self._state_digests(engine, step))
        self._state.paces.begins(step)
        try:
            local = await self._compute(
                view, engine.run(step, train=train, evaluate=evaluate, replay=replay)
            )
            states = await digests
        except NotFinite as found:
            await self._not_finite(view, engine, step, str(found))
        finally:
            digests.cancel()
        if train:
            self._keep_reduced(view, step, engine.reduced)
            self._tools.stores.donor.reduced(step, engine.reduced)
            with recorder.span("guard"):
                await self._guarded(view, plan, step, engine.reduced)
        account = await self.audits.account(view, plan, step, engine, local)
        await rarely.lingers("Prepared late")
        self._say_prepared(view, step, local, states, account)
        with recorder.span("commit"):
            outcome = await self._outcome(view, step, engine.reduced if train else {})
        await self._apply(view, engine, outcome, train=train)
        recorder.end()

    async def _have_shards(self, view: View, plan: Plan, shards: StepShards) -> None:
        """Shards may take minutes on a thin line. They go on coming if the view is over
        meanwhile."""
        fetch = have_shards(self._tools, self._outlet, self._state, view, plan, shards)
        await self._place.offering_until(asyncio.create_task(fetch), view)

    async def _state_digests(self, engine: StepEngine, step: int) -> dict[int, bytes]:
        """Digests of the states that the step starts from, in the steps in which all tell them."""
        if not self._terms.tells_states(step):
            return {}
        digests = {}
        for layer, state in engine.states.items():
            digests[layer] = await self._tools.compute.run_beside(state.file_digest)
        return digests

    async def _not_finite(self, view: View, engine: StepEngine, step: int, cause: str) -> NoReturn:
        """Finite numbers came here, and others would have to be sent on.

        The first time somebody else may be the reason, and all is computed anew. The second time
        the run has diverged: this peer stands still, and says so, until somebody has a new view or
        ends the run.
        """
        state = self._state
        engine.work.end()
        self._work = None
        self._outlet.computed(step, None)
        text = f"step {step} comes to numbers that are not finite: {cause}"
        if self._diverged_at == step:
            state.stuck_at = step
            log.error("the run has diverged: %s", text)
            self._tools.status.say(
                State.WAITING,
                f"the run has diverged: {text}; start it anew from a checkpoint, with a lower "
                "learning rate",
            )
        else:
            self._diverged_at = step
            self._outlet.contradiction(text)
        while not state.is_over(view):
            await state.wait()
        raise Stopped

    def _replay(self, plan: Plan, step: int) -> StageReplay | None:
        """What is left of this stage's part in the step, if it has failed before."""
        replay, me = self._state.replay, self._tools.me
        return replay.stage(plan, me) if replay is not None and replay.step == step else None

    async def _compute(self, view: View, running: Coroutine[Any, Any, LocalResult]) -> LocalResult:
        """The engine's part; meanwhile state is offered to those that wait for it to do theirs.

        A failure may have come while the step before was still applied, and the next view since. A
        peer that then waited for what this view owes would wait for ever.
        """
        state = self._state
        if state.is_over(view):
            running.close()
            raise Stopped
        self._computing = asyncio.create_task(running)
        try:
            return await self._place.offering_until(self._computing, view)
        finally:
            self._computing = None

    def _reduced_alone(self, view: View, step: int, layer: int, gradient: Tensor) -> None:
        """A layer's guardian gets its gradient while the rest of the step is computed."""
        if not self._state.is_over(view):
            self._keep_reduced(view, step, {layer: gradient})
            self._tools.stores.donor.reduced(step, {layer: gradient}, stays=True)

    def _keep_reduced(self, view: View, step: int, reduced: dict[int, Tensor]) -> None:
        self._state.keep_reduced(view.id, step, reduced, self._outlet)

    async def _guarded(self, view: View, plan: Plan, step: int, reduced: dict[int, Tensor]) -> None:
        """Wait until the guardians of layers held here alone have the step's gradients."""
        self.awaits_receipts = True
        try:
            await self._until_received(view, plan, step, reduced)
        finally:
            self.awaits_receipts = False

    async def _until_received(
        self, view: View, plan: Plan, step: int, reduced: dict[int, Tensor]
    ) -> None:
        """Guardians that begin again meanwhile get the state, and the gradients once more."""
        state, receipts, donor = self._state, self._followers.receipts, self._tools.stores.donor
        patience_s = max(GUARDIAN_LIMIT_S, 2 * plan.predicted_step_ns / 1e9)
        give_up_s = now.monotonic_s() + patience_s
        while not state.is_over(view) and receipts is not None and receipts.waits_for(step):
            await self._place.offer_states()
            donor.reduced(step, reduced)
            await state.wait(max(0.0, give_up_s - now.monotonic_s()))
            if now.monotonic_s() >= give_up_s or rarely.happens("guardian given up"):
                give_up_s = now.monotonic_s() + patience_s
                for guardian in receipts.give_up(step):
                    log.warning("%s has not got the states that it guards: goes on", guardian)
        if state.is_over(view):
            raise Stopped

    def _say_prepared(
        self,
        view: View,
        step: int,
        local: LocalResult,
        states: dict[int, bytes],
        account: Account | None,
    ) -> None:
        prepared = Prepared(
            view=view.id,
            step=step,
            peer_id=self._tools.me,
            squared_norms=local.squared_norms,
            loss_sum=local.loss_sum,
            token_count=local.token_count,
            held_out_loss_sum=local.held_out_loss_sum,
            held_out_token_count=local.held_out_token_count,
            ready_for=self._outlet.vouch(),
            kept=self._kept(view, step),
            base=self._outlet.lineage_at(step),
            sums=local.sums,
            states=states,
            audit=account,
            tied=local.tied,
        )
        if self._state.ledger is None or self._state.is_over(view):
            raise Stopped
        signed = sign_prepared(prepared, self._tools.net.sign)
        try:
            self._state.ledger.record(Statement(prepared, signed))
        except PeerFault as fault:
            self._outlet.contradiction(f"this peer computes what cannot be: {fault.cause}")
            raise Stopped from fault
        self._outlet.say_prepared(signed, view)

    def _kept(self, view: View, step: int) -> int:
        """What Prepared says of guardians. Where they keep up it is the step, if all have it, and
        else -1; where they lag, what the cuts say."""
        if view.cut_pace is not None:
            return self._cuts.kept
        receipts, trains = self._followers.receipts, step < self._spec.total_steps
        has_all = receipts is not None and receipts.are_of_all(step if trains else None)
        return step if has_all else -1

    async def _outcome(self, view: View, step: int, reduced: dict[int, Tensor]) -> StepOutcome:
        """Wait for everyone's Prepared.

        After a failure a missing one may be that of a member that needs states from here, and asks
        only now.
        """
        state, status = self._state, self._tools.status
        ledger, is_told = state.ledger, False
        while ledger is not None and not state.is_over(view):
            outcome = ledger.next_outcome()
            if outcome is not None:
                status.facts["waits_for"] = []
                state.step, self.is_applying = outcome.step + 1, True
                self._tools.stores.donor.reduced(step, reduced)  # to those given states since
                self._tools.stores.donor.committed(outcome)
                self._cuts.committed(view, outcome)
                self._state.paces.committed()
                self._outlet.committed(outcome)
                self._followers.committed(outcome)
                return outcome
            if ledger.conflict.reason and not is_told:
                is_told = True
                self._outlet.contradiction(ledger.conflict.reason)
            status.facts["waits_for"] = list(ledger.missing)
            await self._place.offer_states()
            self._tools.stores.donor.reduced(step, reduced)
            await state.wait()
        raise Stopped

    async def _apply(
        self, view: View, engine: StepEngine, outcome: StepOutcome, *, train: bool
    ) -> None:
        """The step is committed: update the states, and save them where it is time."""
        step, spec, state, recorder = outcome.step, self._spec, self._state, self._tools.recorder
        state.forget_reduced(step)
        self.audits.forget()
        lineage = self._outlet.lineage_at(step + 1)
        await rarely.lingers("update late")
        if train:
            await self._cuts.copied()
            apply = recorder.timed("apply", 0, _apply_all)
            await self._tools.compute.run(apply, spec, engine, outcome)
            engine.reduced = {}
            state.forget_applied(step, engine.states)
            self._outlet.applied(step, engine.states)
            state.memory.commit(step, view.id)
        else:
            engine.work.end()
        await self._outlet.settled()
        self.is_applying = False
        if state.view is view:
            self._place.drop_unwanted()
        self._outlet.states_changed()
        self._history.record(outcome)
        if train and spec.saves_at(step + 1):
            with recorder.span("save"):
                await self._tools.stores.checkpoints.save(step + 1, engine.states, lineage)


def _apply_all(spec: RunSpec, engine: StepEngine, outcome: StepOutcome) -> None:
    engine.work.end()
    with engine.work.runner.beside_passes():
        for layer, state in engine.states.items():
            apply_outcome(spec, state, engine.reduced[layer], outcome.step, outcome.gradient_norm)
