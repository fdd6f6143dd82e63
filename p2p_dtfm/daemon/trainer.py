"""The steps of this peer: it takes its place in each view, computes, and commits with the others.

The trainer owns the layers' states. The daemon tells it of agreed views and takeovers, Prepared
messages and tensors; it tells the daemon what it has to say through `Outlet`.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.ledger import STEPS_AHEAD_LIMIT, Ledger
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.core.snapshot import ViewId
from p2p_dtfm.core.step import Prepared, StepOutcome
from p2p_dtfm.core.view import View
from p2p_dtfm.daemon.checkpoints import Checkpoints
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.courier import Courier
from p2p_dtfm.daemon.following import Donor, Follower, apply_outcome
from p2p_dtfm.daemon.initial_states import InitialStates
from p2p_dtfm.daemon.mailbox import Mailbox, held_out_indices
from p2p_dtfm.daemon.status import State, Status
from p2p_dtfm.daemon.step_engine import LocalResult, StepEngine
from p2p_dtfm.daemon.wire import FollowEnded, FollowLayers, LayerOffered, LayersCommitted
from p2p_dtfm.net.blobs import BlobExchange, BlobUnavailable
from p2p_dtfm.net.bulk import BulkPlane
from p2p_dtfm.net.frames import FrameHeader, FrameKind
from p2p_dtfm.train.batches import Batches
from p2p_dtfm.train.data import ShardDamaged, ShardMissing
from p2p_dtfm.train.layer_state import LayerState

log = logging.getLogger("p2p_dtfm")

EARLY_SENDERS_LIMIT = 1024
EARLY_PREPARED_LIMIT = 2 * STEPS_AHEAD_LIMIT
"""Of each sender, from views that have not taken over here."""
VIEWS_REMEMBERED = 64
"""A tensor of one of these comes late; one of any other view was never due."""
RATE_STEPS = 20
SHARD_RETRY_S = 1.0


class Outlet(Protocol):
    """What the trainer asks of the daemon."""

    def say_prepared(self, prepared: Prepared, view: View) -> None:
        """Send to all other members of the view."""

    def committed(self, outcome: StepOutcome) -> None:
        """A step is committed here; the agreement must hear of it before the next begins."""

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
        self._taken_over_at = 0
        self._views: deque[ViewId] = deque(maxlen=VIEWS_REMEMBERED)
        self._early: dict[str, deque[Prepared]] = {}
        self._follower: Follower | None = None
        self._following: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._finishing: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._step_ends: deque[float] = deque(maxlen=RATE_STEPS + 1)

    # what the daemon tells ---------------------------------------------------------------------

    def adopt(self, states: dict[int, LayerState], step: int) -> None:
        """Start from a checkpoint."""
        self.states = states
        self.step = step

    @property
    def held(self) -> dict[int, int]:
        return {layer: state.version for layer, state in self.states.items()}

    def view_agreed(self, view: View) -> None:
        """Bring the layers that the next view wants here; then say synced."""
        me, plan = self._tools.me, view.plan
        self._stop_following()
        self._views.append(view.id)
        if isinstance(plan, Plan) and plan.stage_of(me) is not None:
            self._mailboxes[view.id] = Mailbox(view.id, plan, me, self._spec)
        missing = self._missing_layers(view)
        if not missing or (view.snapshot.step == 0 and view.takes_effect_at_once):
            self._outlet.synced(view.id)
            return
        tools = self._tools
        self._follower = Follower(
            view,
            me,
            self._spec,
            missing,
            self.states,
            tools.courier,
            tools.blobs,
            tools.compute,
            tools.scratch,
            self._follower_progress,
        )
        self._following = asyncio.create_task(self._follower.run())
        self._following.add_done_callback(self._following_ended)

    def _missing_layers(self, view: View) -> set[int]:
        wanted = set(view.layers_of(self._tools.me))
        present = view.snapshot.present
        if present is not None:
            return wanted - set(present.layers_of(self._tools.me))
        step = view.snapshot.step
        return {n for n in wanted if n not in self.states or self.states[n].version != step}

    def _following_ended(self, task: asyncio.Task[None]) -> None:
        """It ends by being cancelled; anything else must not leave this peer waiting for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = error
            self._wake.set()

    def _follower_progress(self) -> None:
        follower = self._follower
        assert follower is not None
        if not follower.missing:
            self._outlet.synced(follower.view.id)
        elif self.view is None:
            self._tools.status.say(State.SYNCING, follower.behind)
        self._wake.set()

    def _stop_following(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None
            self._follower = None

    def take_over(self, view: View, step: int) -> None:
        """From `step` on, steps happen in this view."""
        before = self._ledger
        self._behind = before if before is not None and before.step < step else None
        self._taken_over_at = step
        self.view, self.step = view, step
        if self._behind is not None:
            self._catch_up(self._behind)
        plan = view.plan
        self._ledger = Ledger(view.id, plan, step) if isinstance(plan, Plan) else None
        self._mailboxes = {k: v for k, v in self._mailboxes.items() if k >= view.id}
        early, self._early = self._early, {}
        for prepared in (prepared for statements in early.values() for prepared in statements):
            with contextlib.suppress(PeerFault):
                self.prepared(prepared)
        self._finish_feeding()
        self._wake.set()

    def _catch_up(self, ledger: Ledger) -> None:
        """A peer without a stage may take over before it has seen the last step of the old view."""
        while ledger.step < self._taken_over_at and (outcome := ledger.next_outcome()) is not None:
            self._record(outcome)
        if ledger.step >= self._taken_over_at:
            self._behind = None

    def prepared(self, prepared: Prepared) -> None:
        """Raises `PeerFault`."""
        ledger = self._ledger
        if self._behind is not None and prepared.view == self._behind.view:
            self._behind.record(prepared)
            self._catch_up(self._behind)
        elif ledger is not None and prepared.view == ledger.view:
            ledger.record(prepared)
            self._wake.set()
        elif ledger is None or prepared.view.number > ledger.view.number:
            sender = prepared.peer_id
            if sender not in self._early and len(self._early) >= EARLY_SENDERS_LIMIT:
                raise PeerFault("says Prepared in a view that this peer does not know", sender)
            self._early.setdefault(sender, deque(maxlen=EARLY_PREPARED_LIMIT)).append(prepared)

    def frame(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """Raises `PeerFault` for what is not due."""
        view = ViewId(header.view_number, header.view_digest)
        if view not in self._views:
            raise PeerFault(f"a tensor of view {view}, which this peer does not know", sender)
        if header.kind is FrameKind.LAYER_GRADIENT:
            if self._follower is not None and self._follower.view.id == view:
                self._follower.gradient(sender, header, payload)
            return
        mailbox = self._mailboxes.get(view)
        if mailbox is not None:
            mailbox.put(sender, header, payload)

    def following(
        self, sender: str, message: FollowLayers | LayerOffered | LayersCommitted | FollowEnded
    ) -> None:
        """Raises `PeerFault`."""
        if isinstance(message, FollowLayers):
            self._tools.donor.subscribe(sender, message)
            self._wake.set()
            return
        follower = self._follower
        if follower is None or follower.view.id != message.view:
            return
        if isinstance(message, LayerOffered):
            follower.offered(sender, message)
        elif isinstance(message, LayersCommitted):
            follower.committed(sender, message)
        else:
            follower.ended(sender, message)

    # the loop ---------------------------------------------------------------------------------

    async def run(self) -> None:
        """Take part in views until the last step is committed."""
        while self.step <= self._spec.total_steps:
            view = self.view
            if view is None or not isinstance(view.plan, Plan):
                await self._idle()
            elif view.plan.stage_of(self._tools.me) is None:
                self._tools.status.say(State.SPARE, "the plan is faster without this peer")
                await self._watch(view)
            else:
                await self._train(view, view.plan)
        self._tools.status.say(State.DONE, f"all {self._spec.total_steps} steps are committed")
        self.done.set()

    async def _idle(self) -> None:
        """No steps happen: give state to whoever asks, until something changes."""
        if self._tools.donor.has_new_followers:
            await self._tools.donor.offer(self.states)
        await self._wait()

    async def _watch(self, view: View) -> None:
        """As a spare: learn the outcomes, hold no state."""
        while self.view is view and self.step <= self._spec.total_steps:
            outcome = self._ledger.next_outcome() if self._ledger else None
            if outcome is None:
                await self._wait()
                continue
            self._record(outcome)
            self.step = outcome.step + 1
            self._outlet.committed(outcome)

    async def _train(self, view: View, plan: Plan) -> None:
        await self._have_states(view, plan)
        if self.view is not view:
            return
        states = {layer: self.states[layer] for layer in plan.layers_of(self._tools.me)}
        engine = StepEngine(
            self._mailboxes[view.id],
            plan,
            self._tools.me,
            self._spec,
            states,
            self._tools.batches,
            self._tools.bulk,
            self._tools.compute,
        )
        while self.view is view and self.step <= self._spec.total_steps:
            await self._one_step(view, plan, engine)
        if self.view is not view:
            self._drop_states()

    async def _have_states(self, view: View, plan: Plan) -> None:
        """Wait until every layer of this peer's stage is at the step that comes."""
        status = self._tools.status
        for layer in plan.layers_of(self._tools.me):
            if self.step == 0 and layer not in self.states:
                self.states[layer] = await self._tools.initial.state(layer)
        while self.view is view:
            late = [
                layer
                for layer in plan.layers_of(self._tools.me)
                if layer not in self.states or self.states[layer].version != self.step
            ]
            if not late:
                break
            status.say(State.SYNCING, f"{len(late)} layers are not at step {self.step} yet")
            await self._wait()
        self._stop_following()

    async def _one_step(self, view: View, plan: Plan, engine: StepEngine) -> None:
        step, spec = self.step, self._spec
        train = step < spec.total_steps
        evaluate = not train or step % spec.evaluation.every_steps == 0
        if self._tools.donor.has_new_followers:
            await self._tools.donor.offer(self.states)
        await self._have_shards(plan, step, evaluate)
        self._tools.status.say(State.TRAINING, f"step {step} of {spec.total_steps}")
        local = await engine.run(step, train=train, evaluate=evaluate)
        if train:
            self._tools.donor.reduced(step, engine.states)
        self._say_prepared(view, step, local)
        outcome = await self._outcome(view)
        if train:
            await self._tools.compute.run(_apply, spec, engine.states, outcome)
        self._tools.donor.committed(outcome)
        self._record(outcome)
        self.step = step + 1
        if train and (
            self.step % spec.checkpoint.every_steps == 0 or self.step == spec.total_steps
        ):
            await self._tools.checkpoints.save(self.step, engine.states)
        self._outlet.committed(outcome)

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
        assert self._ledger is not None
        self._ledger.record(prepared)
        self._outlet.say_prepared(prepared, view)

    async def _outcome(self, view: View) -> StepOutcome:
        """Wait for everyone's Prepared."""
        assert self._ledger is not None
        while (outcome := self._ledger.next_outcome()) is None:
            missing = self._ledger.missing
            self._tools.status.facts["waits_for"] = list(missing)
            await self._wait()
        self._tools.status.facts["waits_for"] = []
        return outcome

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
        while True:
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

    def _finish_feeding(self) -> None:
        """A view has taken over: what its followers still lack is queued; send it to the end."""
        task = asyncio.create_task(self._tools.donor.finish())
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    def _drop_states(self) -> None:
        """Keep what this peer's place in the present view needs."""
        if self.view is not None:
            keep = set(self.view.layers_of(self._tools.me))
            self.states = {n: state for n, state in self.states.items() if n in keep}

    async def _wait(self) -> None:
        await self._wake.wait()
        self._wake.clear()
        if self._failure is not None:
            raise self._failure

    # what is known of the run -------------------------------------------------------------------

    def _record(self, outcome: StepOutcome) -> None:
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
        """Feed the followers of the view that took over to the end."""
        await asyncio.gather(self._tools.donor.finish(), *self._finishing)

    async def close(self) -> None:
        self._stop_following()
        self._tools.donor.close()
        for task in self._finishing:
            task.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)


def _apply(spec: RunSpec, states: dict[int, LayerState], outcome: StepOutcome) -> None:
    for state in states.values():
        gradient = state.gradient_vector()
        apply_outcome(spec, state, gradient, outcome.step, outcome.gradient_norm)
