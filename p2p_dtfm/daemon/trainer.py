"""The steps of this peer: it takes its place in each view, computes, and commits with the others.

The trainer owns the layers' states. The daemon tells it of agreed views and takeovers, Prepared
messages and tensors; it tells the daemon what it has to say through `Outlet`.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.guardians import Receipts, guarded_layers
from p2p_dtfm.core.inventory import Restart
from p2p_dtfm.core.ledger import STEPS_AHEAD_LIMIT, Ledger
from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.step import Prepared, StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.core.wire_plan import wire_plan
from p2p_dtfm.daemon.checkpoints import Checkpoints
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.donor import Donor
from p2p_dtfm.daemon.follower import (
    Follower,
    FollowerTools,
    OnGradient,
    apply_outcome,
    replay_outcome,
)
from p2p_dtfm.daemon.initial_states import InitialStates
from p2p_dtfm.daemon.mailbox import Mailbox, held_out_indices
from p2p_dtfm.daemon.status import State, Status
from p2p_dtfm.daemon.step_engine import LocalResult, StepEngine
from p2p_dtfm.daemon.step_recorder import StepRecorder
from p2p_dtfm.daemon.wire import (
    FollowDone,
    FollowEnded,
    FollowLayers,
    LayerOffered,
    LayerReceipt,
    LayersCommitted,
)
from p2p_dtfm.net.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.bulk import BulkPlane
from p2p_dtfm.net.frames import FrameHeader, FrameKind
from p2p_dtfm.train.batches import Batches
from p2p_dtfm.train.data import ShardDamaged, ShardMissing
from p2p_dtfm.train.layer_state import LayerState
from p2p_dtfm.train.replica_memory import ReplicaMemory

log = logging.getLogger("p2p_dtfm")
Tensor = Any
Following = FollowLayers | LayerOffered | LayersCommitted | LayerReceipt | FollowEnded | FollowDone

EARLY_SENDERS_LIMIT = 1024
EARLY_PREPARED_LIMIT = 2 * STEPS_AHEAD_LIMIT
"""Of each sender, from views that have not taken over here."""
VIEWS_REMEMBERED = 64
"""A tensor of one of these comes late; one of any other view was never due."""
RATE_STEPS = 20
UNKNOWN_VIEW_WAIT_S = 5.0
UNKNOWN_VIEW_POLL_S = 0.02
SHARD_RETRY_S = 1.0
SETTLE_LIMIT_S = 30.0
SETTLE_POLL_S = 0.02
GUARDIAN_POLL_S = 0.2
GUARDIAN_GRACE_S = 3.0
"""How long a layer that is guarded here may take to catch up before it is asked for anew."""


class Outlet(Protocol):
    """What the trainer asks of the daemon."""

    def say_prepared(self, prepared: Prepared, view: View) -> None:
        """Send to all other members of the view."""

    def committed(self, outcome: StepOutcome) -> None:
        """The ledger gave an outcome, which is not applied yet."""

    def states_changed(self) -> None:
        """What is held, or its version, is another."""

    def reduced(self, step: int, layers: set[int]) -> None:
        """The reduced gradients of these layers are here, and are kept."""

    def skip_to(self, step: int) -> None:
        """Without a stage: somebody prepares `step`, so all before it are committed."""

    def trouble(self, peer_id: str, cause: str) -> None:
        """What a peer needs for the step under way, or what it sent for it, is lost."""

    def lineage_at(self, step: int) -> str:
        """The digest of the lineage of states after `step` committed steps."""

    def ready_for(self) -> ViewId | None:
        """The next view, if all its members are synced."""

    def synced(self, view: ViewId) -> None:
        """This peer has what its place in the next view needs."""

    async def fetch_shards(self, digests: set[str]) -> None:
        """Bring data shards. Raises `BlobUnavailable`."""

    def damaged_shard(self, digest: str) -> None:
        """A shard on this disk is not what it was: put it aside."""


@dataclass(frozen=True)
class Tools:
    """What the trainer works with."""

    me: str
    spec: RunSpec
    batches: Batches
    courier: Courier
    bulk: BulkPlane
    blobs: BlobExchange
    compute: Compute
    checkpoints: Checkpoints
    donor: Donor
    initial: InitialStates
    scratch: Path
    status: Status
    recorder: StepRecorder = field(default_factory=StepRecorder)


class Trainer:
    """`run` trains until the run is done or it is cancelled."""

    def __init__(self, tools: Tools, outlet: Outlet) -> None:
        self.states: dict[int, LayerState] = {}
        self.view: View | None = None
        self.step = 0
        self.done = asyncio.Event()
        self.losses: deque[tuple[int, float]] = deque(maxlen=4096)
        self.held_out: deque[tuple[int, float]] = deque(maxlen=4096)
        self._tools = tools
        self._outlet = outlet
        self._spec = tools.spec
        self._mailboxes: dict[ViewId, Mailbox] = {}
        self._ledger: Ledger | None = None
        self._behind: Ledger | None = None
        self._recorded_step = -1
        self._applying = False
        """A step is committed, and its update under way."""
        self._stopped = False
        self._has_settled = True
        """All states that the present view wants here are here."""
        self._next_view: View | None = None
        self._restart: Restart | None = None
        self._computing: asyncio.Task[LocalResult] | None = None
        self._memory = ReplicaMemory()
        self._reduced: dict[tuple[ViewId, int], dict[int, Tensor]] = {}
        self._views: deque[ViewId] = deque(maxlen=VIEWS_REMEMBERED)
        self._early: dict[str, deque[Prepared]] = {}
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        self._guardian: Follower | None = None
        self._guarding: asyncio.Task[None] | None = None
        self._receipts: Receipts | None = None
        self._request_numbers = itertools.count(1)
        self._wanted: set[int] = set()
        self._wanted_next: set[int] = set()
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._step_ends: deque[float] = deque(maxlen=RATE_STEPS + 1)

    # what the daemon tells ---------------------------------------------------------------------

    def adopt(self, states: dict[int, LayerState], step: int) -> None:
        """Start from a checkpoint."""
        self.states = states
        self.step = step

    @property
    def held(self) -> dict[int, int] | None:
        """The version of each layer here; None while a restart is due that will change them."""
        if self._restart is not None:
            return None
        return {layer: state.version for layer, state in self.states.items()}

    def view_agreed(self, view: View, discard: bool) -> None:
        """Bring the layers that the next view wants here; then say synced.

        An unplanned view takes over first, and its layers come while its first step waits.
        """
        me, plan = self._tools.me, view.plan
        if self._has_settled or not view.snapshot.planned:
            self._stop_following()
        if discard:
            self.states.clear()
            self._memory.keep_only(())
        self._views.append(view.id)
        if isinstance(plan, Plan) and plan.stage_of(me) is not None:
            wire = wire_plan(self._spec, plan, view.snapshot)
            self._mailboxes[view.id] = Mailbox(view.id, plan, me, self._spec, wire)
        self._wake.set()
        self._next_view = view if view.snapshot.planned else None
        if self._has_settled:
            self._prepare_next_view()

    def _prepare_next_view(self) -> None:
        """Follow what the next planned view wants here; not before the present one has started."""
        view, self._next_view = self._next_view, None
        if view is None:
            return
        self._wanted_next = set(view.layers_of(self._tools.me))
        missing = self._wanted_next - self._kept_up()
        if missing:
            self._start_following(view, missing)
        else:
            self._outlet.synced(view.id)

    def _kept_up(self) -> set[int]:
        """Layers here whose states every commit moves on: of this peer's stage, or guarded.

        A layer that was handed over stays for a step, but is no longer what its holder has.
        """
        kept = set(self.view.layers_of(self._tools.me)) if self.view is not None else set()
        if self._guardian is not None:
            kept |= self._guardian.layers - self._guardian.missing
        return kept & set(self.states)

    def _start_following(self, view: View, missing: set[int]) -> None:
        self._follower = self._new_follower(view, missing, self._follower_progress)
        self._following = asyncio.create_task(self._follower.run())
        self._following.add_done_callback(self._following_ended)

    def _new_follower(
        self,
        view: View,
        layers: set[int],
        on_progress: Callable[[], None],
        on_gradient: OnGradient | None = None,
    ) -> Follower:
        tools = self._tools
        follower_tools = FollowerTools(
            me=tools.me,
            spec=self._spec,
            states=self.states,
            courier=tools.courier,
            blobs=tools.blobs,
            compute=tools.compute,
            scratch=tools.scratch,
            numbers=self._request_numbers,
        )
        return Follower(view, layers, follower_tools, on_progress, on_gradient)

    def _start_guarding(self, view: View) -> None:
        """Follow the layers of this view that one other member holds alone and this one guards."""
        self._stop_guarding()
        me = self._tools.me
        guards = guarded_layers(view.plan, view.member_ids)
        mine = {layer for layer, guardian in guards.items() if guardian == me}
        alone = {layer: peer for layer, peer in guards.items() if layer in view.layers_of(me)}
        self._receipts = Receipts(view.id, alone)
        self._wanted = set(view.layers_of(me)) | mine
        if not mine:
            return
        self._guardian = self._new_follower(view, mine, self._outlet.states_changed, self._guard)
        self._guarding = asyncio.create_task(self._guardian.run())
        self._guarding.add_done_callback(self._following_ended)

    def _guard(self, holder: str, layer: int, step: int, gradient: Tensor) -> None:
        """A step's gradient of a guarded layer is here: keep it, and give a receipt."""
        guardian = self._guardian
        if guardian is None or self._stopped:
            return
        view = guardian.view.id
        self._reduced.setdefault((view, step), {})[layer] = gradient
        self._outlet.reduced(step, {layer})
        self._tools.courier.tell(holder, LayerReceipt(view, step, (layer,)))

    def _drop_unwanted(self) -> None:
        """A step has committed in this view, so everyone has what it needed from this peer."""
        for layer in set(self.states) - self._wanted - self._wanted_next:
            del self.states[layer]

    def _stop_guarding(self) -> None:
        if self._guarding is not None and self._guardian is not None:
            self._guarding.cancel()
            self._guardian.release_donors()
        self._guarding = self._guardian = None

    def _following_ended(self, task: asyncio.Task[None]) -> None:
        """It ends by being cancelled; anything else must not leave this peer waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake.set()

    def _follower_progress(self) -> None:
        follower = self._follower
        assert follower is not None
        self._outlet.states_changed()
        if not follower.missing:
            self._outlet.synced(follower.view.id)
        elif self.view is None:
            self._tools.status.say(State.SYNCING, follower.behind)
        self._wake.set()

    def _stop_following(self) -> None:
        if self._following is not None and self._follower is not None:
            self._following.cancel()
            self._follower.release_donors()
            self._following = None
            self._follower = None

    def stop_step(self) -> None:
        """A failure: the step under way is decided by the next view. Keep all, compute nothing."""
        self._stopped = True
        self._stop_guarding()
        if self._computing is not None:
            self._computing.cancel()
        self._wake.set()

    def leave_views(self) -> None:
        """This peer is in no view any more; a step that has just committed is still applied."""
        self._stop_following()
        if self._guardian is not None:
            for layer in self._guardian.layers:
                self.states.pop(layer, None)
        self._stop_guarding()
        self.view = self._ledger = None
        self._wake.set()

    async def settled(self) -> None:
        """Wait, for a bounded time, until the last committed step is applied to all states."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_LIMIT_S):
                while self._applying and not self._stopped:
                    await asyncio.sleep(SETTLE_POLL_S)

    def take_over(
        self, view: View, step: int, ledger: Ledger | None, restart: Restart | None
    ) -> None:
        """From `step` on, steps happen in this view and commit in `ledger`."""
        before = self._ledger
        self._behind = before if before is not None and restart is None else None
        self._recorded_step = min(self._recorded_step, step - 1)
        self.view, self.step = view, step
        self._catch_up()
        self._ledger, self._restart = ledger, restart or self._restart
        self._stopped, self._wanted_next = False, set()
        self._has_settled = isinstance(view.plan, NoPlan) or not view.layers_of(self._tools.me)
        self._mailboxes = {k: v for k, v in self._mailboxes.items() if k >= view.id}
        early, self._early = self._early, {}
        for prepared in (prepared for statements in early.values() for prepared in statements):
            with contextlib.suppress(PeerFault):
                self.prepared(prepared)
        if self._follower is not None:
            self._follower.taken_over = self._follower.view.id == view.id
        self._tools.donor.take_over(view.id)
        self._wake.set()

    def _catch_up(self) -> None:
        """A peer without a stage may take over before it has seen the last step of the old view."""
        ledger = self._behind
        while ledger is not None and ledger.step < self.step:
            if (outcome := ledger.next_outcome()) is None:
                return
            self._record(outcome)
        self._behind = None

    def prepared(self, prepared: Prepared) -> None:
        """Raises `PeerFault`."""
        ledger = self._ledger
        if self._behind is not None and prepared.view == self._behind.view:
            self._behind.record(prepared)
            self._catch_up()
        elif ledger is not None and prepared.view == ledger.view:
            is_ahead = prepared.step >= ledger.step + STEPS_AHEAD_LIMIT
            if is_ahead and self.view is not None and not self.view.layers_of(self._tools.me):
                self._outlet.skip_to(prepared.step)
                self.step = ledger.step
            ledger.record(prepared)
            self._wake.set()
        elif ledger is None or prepared.view.number > ledger.view.number:
            sender = prepared.peer_id
            if sender not in self._early and len(self._early) >= EARLY_SENDERS_LIMIT:
                raise PeerFault("says Prepared in a view that this peer does not know", sender)
            self._early.setdefault(sender, deque(maxlen=EARLY_PREPARED_LIMIT)).append(prepared)

    async def frame(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """Raises `PeerFault` for what is not due.

        A peer that took over earlier may send before this one knows the view: its lane waits.
        """
        view = ViewId(header.view_number, header.view_digest)
        end_s = time.monotonic() + UNKNOWN_VIEW_WAIT_S
        while view not in self._views:
            is_next = self.view is None or view.number > self.view.id.number
            if not is_next or time.monotonic() > end_s:
                raise PeerFault(f"a tensor of view {view}, which this peer does not know", sender)
            await asyncio.sleep(UNKNOWN_VIEW_POLL_S)
        if header.kind is FrameKind.LAYER_GRADIENT:
            for follower in (self._follower, self._guardian):
                if follower is not None and header.layer in follower.layers:
                    follower.gradient(sender, header, payload)
            return
        mailbox = self._mailboxes.get(view)
        if mailbox is not None:
            mailbox.put(sender, header, payload)

    def following(self, sender: str, message: Following) -> None:
        """Raises `PeerFault`."""
        donor = self._tools.donor
        if isinstance(message, FollowLayers):
            donor.subscribe(sender, message)
            if self._receipts is not None and message.from_takeover:
                self._receipts.begins_again(sender)
            self._wake.set()
        elif isinstance(message, FollowDone):
            donor.unsubscribe(sender, message.view, message.number)
        elif isinstance(message, LayerReceipt):
            self._receive_receipt(sender, message)
        elif (follower := self._follower_that_asked(sender, message.number)) is None:
            return  # the answer to an earlier request
        elif isinstance(message, LayerOffered):
            follower.offered(sender, message)
        elif isinstance(message, LayersCommitted):
            follower.committed(sender, message)
        else:
            follower.ended(sender, message)

    def stream_lost(self, sender: str) -> None:
        """What `sender` had sent of layers' states may not all arrive."""
        for follower in (self._follower, self._guardian):
            if follower is not None:
                follower.stream_lost(sender)

    def undelivered(self, receiver: str) -> None:
        """Gradients on their way to a follower are lost."""
        self._tools.donor.undelivered(receiver)

    def _receive_receipt(self, sender: str, message: LayerReceipt) -> None:
        if self._receipts is not None:
            self._receipts.receipt(sender, message.view, message.step, message.layers)
            if self._receipts.received_all_of(sender):
                self._tools.donor.arrived(sender, message.view)
            self._wake.set()

    def _follower_that_asked(self, sender: str, number: int) -> Follower | None:
        for follower in (self._follower, self._guardian):
            if follower is not None and follower.has_asked(sender, number):
                return follower
        return None

    # the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part in views; `done` is set when the last step is committed. Never ends."""
        while True:
            view = self.view
            if self.step > self._spec.total_steps and not self.done.is_set():
                self._tools.status.say(
                    State.DONE, f"all {self._spec.total_steps} steps are committed"
                )
                self.done.set()
            if self._restart is not None:
                await self._do_restart(self._restart)
            elif (
                self.done.is_set() or self._stopped or view is None or isinstance(view.plan, NoPlan)
            ):
                await self._idle()
            elif view.plan.stage_of(self._tools.me) is None:
                self._tools.status.say(State.SPARE, "the plan is faster without this peer")
                await self._watch(view)
            else:
                with contextlib.suppress(_Stopped):
                    await self._train(view, view.plan)

    async def _do_restart(self, restart: Restart) -> None:
        """Bring the states to where an unplanned view starts; see `core.inventory.Restart`."""
        step, compute = self.step, self._tools.compute
        self._memory.forget((*restart.discard, *restart.load))
        for layer in restart.discard:
            self.states.pop(layer, None)
        for layer in restart.load:
            if step == 0:
                self.states[layer] = await self._tools.initial.state(layer)
            else:
                self.states[layer] = await self._tools.checkpoints.load(layer, step)
        if restart.rolled_view is not None and restart.outcome is not None:
            kept = self._reduced.get((restart.rolled_view, step - 1), {})
            norm = restart.outcome.gradient_norm
            for layer in restart.roll_forward:
                state = self.states[layer]
                await compute.run(replay_outcome, self._spec, state, kept[layer], step - 1, norm)
            self._memory.commit(step - 1)
            self._record(restart.outcome)
        if self._restart is restart:
            self._restart = None
        self._outlet.states_changed()

    async def _offer_states(self) -> None:
        """To new followers; after a failure only what the next view has put right."""
        if self._tools.donor.has_new_followers and not self._stopped and self._restart is None:
            await self._tools.donor.offer(self.states, min(self.step, self._spec.total_steps))

    async def _idle(self) -> None:
        """No steps happen: give state to whoever asks, until something changes.

        A guardian without a plan lets its donors go once it has the last step of the view before.
        """
        await self._offer_states()
        if self._guardian is None or self._stopped:
            await self._wait()
            return
        if not self._guardian.missing and not self._late(self._guardian.layers):
            self._stop_guarding()
        await self._wait(GUARDIAN_POLL_S)

    async def _watch(self, view: View) -> None:
        """As a spare: learn the outcomes, and guard what one member holds alone."""
        self._start_guarding(view)
        self._outlet.states_changed()
        while self.view is view and not self._stopped and self.step <= self._spec.total_steps:
            outcome = self._ledger.next_outcome() if self._ledger else None
            if outcome is None:
                await self._offer_states()
                await self._wait()
                continue
            self._record(outcome)
            self._drop_unwanted()
            self.step = outcome.step + 1
            self._outlet.committed(outcome)
            self._forget_reduced(outcome.step)

    async def _train(self, view: View, plan: Plan) -> None:
        await self._have_states(view, plan)
        if self.view is not view:
            return
        states = {layer: self.states[layer] for layer in plan.layers_of(self._tools.me)}
        self._memory.keep_only(states)
        engine = StepEngine(
            self._mailboxes[view.id],
            plan,
            self._tools.me,
            self._spec,
            states,
            self._tools.batches,
            self._tools.bulk,
            self._tools.compute,
            self._outlet.trouble,
            self._memory,
            self._tools.recorder,
        )
        while self.view is view and self.step <= self._spec.total_steps:
            await self._one_step(view, plan, engine)

    async def _have_states(self, view: View, plan: Plan) -> None:
        """Wait until every layer of this peer's stage is at the step that comes."""
        mine = plan.layers_of(self._tools.me)
        for layer in mine:
            if self.step == 0 and layer not in self.states:
                self.states[layer] = await self._tools.initial.state(layer)
        grace_end_s = time.monotonic() + GUARDIAN_GRACE_S
        while late := self._late(mine):
            guarded = self._guardian.layers if self._guardian is not None else frozenset()
            grace_s = grace_end_s - time.monotonic() if late <= guarded else 0.0
            if self._follower is None and grace_s <= 0:
                self._stop_guarding()
                self._memory.forget(late)
                self._start_following(view, late)
            text = f"{len(late)} layers are not at step {self.step} yet"
            self._tools.status.say(State.SYNCING, text)
            await self._offer_states()
            await self._wait(grace_s if grace_s > 0 else None)
            if self._stopped or self.view is not view:
                raise _Stopped
        self._stop_following()
        self._start_guarding(view)
        self._outlet.states_changed()
        self._has_settled = True
        self._prepare_next_view()

    def _late(self, layers: Iterable[int]) -> set[int]:
        held = self.states
        return {n for n in layers if n not in held or held[n].version != self.step}

    async def _one_step(self, view: View, plan: Plan, engine: StepEngine) -> None:
        step, spec, recorder = self.step, self._spec, self._tools.recorder
        train = step < spec.total_steps
        evaluate = not train or step % spec.evaluation.every_steps == 0
        await self._offer_states()
        await self._have_shards(plan, step, evaluate)
        self._tools.status.say(State.TRAINING, f"step {step} of {spec.total_steps}")
        local = await self._compute_step(engine, step, train=train, evaluate=evaluate)
        if train:
            self._tools.donor.reduced(step, engine.reduced)
            self._keep_reduced(view, step, engine)
            with recorder.span("guard"):
                await self._guarded(step)
        self._say_prepared(view, step, local)
        with recorder.span("commit"):
            outcome = await self._outcome(view)
        self._forget_reduced(step)
        lineage = self._outlet.lineage_at(step + 1)
        if train:
            apply = recorder.timed("apply", 0, _apply)
            await self._tools.compute.run(apply, spec, engine, outcome)
            self._memory.commit(step)
        self._applying = False
        if self.view is view:
            self._drop_unwanted()
        self._outlet.states_changed()
        self._record(outcome)
        is_due = (step + 1) % spec.checkpoint.every_steps == 0 or step + 1 == spec.total_steps
        if train and is_due:
            with recorder.span("save"):
                await self._tools.checkpoints.save(step + 1, engine.states, lineage)
        recorder.end()

    async def _compute_step(
        self, engine: StepEngine, step: int, *, train: bool, evaluate: bool
    ) -> LocalResult:
        """The engine's part, while state is offered to those who wait for it to do theirs."""
        self._computing = asyncio.create_task(engine.run(step, train=train, evaluate=evaluate))
        try:
            while not self._computing.done():
                waking = asyncio.create_task(self._wake.wait())
                await asyncio.wait({self._computing, waking}, return_when=asyncio.FIRST_COMPLETED)
                waking.cancel()
                self._wake.clear()
                if not self._computing.done():
                    await self._offer_states()
            if self._stopped or self._computing.cancelled():
                raise _Stopped
            return self._computing.result()
        finally:
            self._computing.cancel()
            self._computing = None
            self._wake.set()

    async def _guarded(self, step: int) -> None:
        """Wait until the guardians of layers held here alone have the step's gradients."""
        while not self._stopped and self._receipts is not None and self._receipts.waits_for(step):
            await self._wait()
        if self._stopped:
            raise _Stopped

    def _forget_reduced(self, committed_step: int) -> None:
        """Gradients before the last committed step are not needed for any recovery."""
        self._reduced = {k: held for k, held in self._reduced.items() if k[1] >= committed_step}

    def _keep_reduced(self, view: View, step: int, engine: StepEngine) -> None:
        """Until a later step commits, the next view may have to roll this one forward."""
        kept = self._reduced.setdefault((view.id, step), {})
        for layer, gradient in engine.reduced.items():
            is_buffer = gradient is engine.states[layer].gradient_vector()
            kept[layer] = gradient.clone() if is_buffer else gradient
        self._outlet.reduced(step, set(engine.reduced))

    def _say_prepared(self, view: View, step: int, local: LocalResult) -> None:
        prepared = Prepared(
            view=view.id,
            step=step,
            peer_id=self._tools.me,
            squared_norms=local.squared_norms,
            loss_sum=local.loss_sum,
            token_count=local.token_count,
            held_out_loss_sum=local.held_out_loss_sum,
            held_out_token_count=local.held_out_token_count,
            ready_for=self._outlet.ready_for(),
        )
        if self._ledger is None or self._stopped:
            raise _Stopped
        self._ledger.record(prepared)
        self._outlet.say_prepared(prepared, view)

    async def _outcome(self, view: View) -> StepOutcome:
        """Wait for everyone's Prepared."""
        ledger = self._ledger
        while not self._stopped and self.view is view and ledger is not None:
            outcome = ledger.next_outcome()
            if outcome is not None:
                self._tools.status.facts["waits_for"] = []
                self.step, self._applying = outcome.step + 1, True
                self._tools.donor.committed(outcome)
                self._outlet.committed(outcome)
                return outcome
            self._tools.status.facts["waits_for"] = list(ledger.missing)
            await self._wait()
        raise _Stopped

    async def _have_shards(self, plan: Plan, step: int, evaluate: bool) -> None:
        """Bring the data shards of this step, where this stage reads tokens."""
        place = plan.place_of(self._tools.me)
        assert place is not None
        pipeline = plan.pipelines[place[0]]
        if 0 < place[1] < len(pipeline.stages) - 1:
            return
        train = step < self._spec.total_steps
        indices = pipeline.microbatches if train else range(0)
        held_out = evaluate and bool(held_out_indices(plan, self._spec, place[0]))
        needed = self._tools.batches.shards(step, indices, held_out=held_out)
        while not self._stopped:
            try:
                await self._outlet.fetch_shards(needed)
                await self._tools.compute.run(self._tools.batches.open_shards, needed)
                return
            except ShardDamaged as error:
                log.warning("%s", error.cause)
                self._outlet.damaged_shard(error.digest)
            except ShardMissing as error:
                log.warning("%s", error)
            except BlobUnavailable as error:
                self._say_shard_missing(error)
                await asyncio.sleep(SHARD_RETRY_S)
            except OSError as error:
                self._tools.status.say(
                    State.WAITING,
                    f"a data shard cannot be written ({error}); free space on that disk",
                )
                await asyncio.sleep(SHARD_RETRY_S)

    def _say_shard_missing(self, error: BlobUnavailable) -> None:
        """Waiting, until a peer turns up that has it or somebody puts the file back."""
        causes = "; ".join(f"{peer}: {cause}" for peer, cause in error.causes.items())
        self._tools.status.say(
            State.WAITING,
            f"data shard {error.digest[:16]} is missing here, and no peer gives it "
            f"({causes or 'there is no other peer'}); it is taken as soon as a peer has it. "
            "If these data are your own: end this daemon, make them anew with the same command, "
            "and start again",
        )

    async def _wait(self, limit_s: float | None = None) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            raise self._failure

    # what is known of the run -------------------------------------------------------------------

    def _record(self, outcome: StepOutcome) -> None:
        if outcome.step <= self._recorded_step:
            return
        self._recorded_step = outcome.step
        if outcome.loss is not None:
            self.losses.append((outcome.step, outcome.loss))
            self._step_ends.append(time.monotonic())
        if outcome.held_out_loss is not None:
            self.held_out.append((outcome.step, outcome.held_out_loss))
        self._tools.status.facts |= self.facts()
        self._on_record(outcome)

    _on_record: Callable[[StepOutcome], None] = staticmethod(lambda outcome: None)

    def on_record(self, hook: Callable[[StepOutcome], None]) -> None:
        """`hook(outcome)` is called for every committed step."""
        self._on_record = hook  # type: ignore[method-assign]

    def facts(self) -> dict[str, object]:
        """Step, losses, rate and ETA for the status."""
        rate = self._steps_per_s()
        left = max(0, self._spec.total_steps - self.step)
        return {
            "step": min(self.step + 1, self._spec.total_steps) if self.losses else self.step,
            "total_steps": self._spec.total_steps,
            "loss": self.losses[-1][1] if self.losses else None,
            "held_out_loss": self.held_out[-1][1] if self.held_out else None,
            "tokens_per_s": round(rate * self._spec.tokens_per_step, 1) if rate else None,
            "eta_s": round(left / rate, 1) if rate else None,
        }

    def _steps_per_s(self) -> float | None:
        if len(self._step_ends) < 2:
            return None
        return (len(self._step_ends) - 1) / (self._step_ends[-1] - self._step_ends[0])

    async def hand_over(self) -> None:
        """Wait, for a bounded time, until those who take over layers from here have them."""
        await self._tools.donor.drain()

    async def close(self) -> None:
        self._stop_following()
        self._stop_guarding()
        self._tools.donor.close()


class _Stopped(Exception):
    """The step under way will not be ended in this view."""


def _apply(spec: RunSpec, engine: StepEngine, outcome: StepOutcome) -> None:
    for layer, state in engine.states.items():
        gradient = engine.reduced[layer]
        apply_outcome(spec, state, gradient, outcome.step, outcome.gradient_norm)
