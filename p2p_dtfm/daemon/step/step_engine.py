"""One peer's part of a step: microbatches through its stage, and the reduction of its segments."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.recovery.partial_replay import StageReplay, whole_step
from p2p_dtfm.daemon.machine.compute import Compute
from p2p_dtfm.daemon.step.mailbox import Mailbox, segments_of
from p2p_dtfm.daemon.step.microbatches import BatchOf, Microbatches, OnProgress
from p2p_dtfm.daemon.step.open_step_work import OpenStepWork
from p2p_dtfm.daemon.step.step_frames import FrameTransport, StepFrames
from p2p_dtfm.daemon.step.step_reduction import OnAlone, StepReduction
from p2p_dtfm.daemon.telemetry.step_recorder import StepRecorder
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import squared_norm
from p2p_dtfm.train.stage.finite import NotFinite
from p2p_dtfm.train.stage.local_steps import LocalSteps, inner_microbatches
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

Tensor = Any


@dataclass(frozen=True)
class LocalResult:
    """What a stage-holder states in its Prepared."""

    squared_norms: dict[int, float]
    loss_sum: float
    token_count: int
    held_out_loss_sum: float
    held_out_token_count: int
    sums: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    """By segment with other holders, digests of each holder's sums."""


class StepEngine:
    """Steps of one view at one stage-holder.

    `batch(step, index)` gives the tokens of a microbatch; indices from `microbatches_per_step` on
    are held-out ones. It runs in the compute thread. A peer that cannot be sent a tensor,
    or sends what is not due, is told to `on_trouble(peer_id, cause)`; the step may then not end by
    itself. What the replica remembers for itself is proposed to `memory`; committing is the
    caller's.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        plan: Plan,
        me: str,
        spec: RunSpec,
        states: dict[int, LayerState],
        batch: BatchOf,
        transport: FrameTransport,
        compute: Compute,
        on_trouble: Callable[[str, str], None],
        memory: ReplicaMemory,
        recorder: StepRecorder | None = None,
        recompute: bool = False,
        work: OpenStepWork | None = None,
        on_progress: OnProgress = lambda step, progress: None,
        on_alone: OnAlone | None = None,
        on_poison: Callable[[str, str], None] | None = None,
    ) -> None:
        """`work` is of an earlier view, with the same states. `on_alone` is told of the reduced
        gradient of each layer that nobody else holds, as soon as it is there.
        `on_poison(peer_id, cause)` of whoever sent what no correct peer sends."""
        place = plan.place_of(me)
        assert place is not None, "a spare has no steps to compute"
        self.mailbox = mailbox
        self.view = mailbox.view
        self.states = states
        self._me = me
        self._spec = spec
        self._compute = compute
        self._recorder = recorder or StepRecorder()
        self.frames = StepFrames(self.view, transport, on_trouble, on_poison)
        self.work = work or OpenStepWork(compute.stage_runner(spec, states, recompute))
        self.reduced: dict[int, Tensor] = {}
        """By layer, once a step has run; the memory is used again two steps later. The gradient
        buffers still hold this peer's own part."""
        self._runner = self.work.runner
        self._recompute = recompute
        self.whole = whole_step(plan, me)
        """This stage's part in a step of which nothing is done."""
        self._pipeline = plan.pipelines[place[0]]
        self._is_local = spec.sync.mode == "local"
        self._microbatches = Microbatches(
            mailbox,
            plan,
            me,
            spec,
            self.work,
            batch,
            self.frames,
            compute,
            self._recorder,
            (lambda step, progress: None) if self._is_local else on_progress,
        )
        self._segments = segments_of(plan, me)
        self._memory = memory
        self._on_alone = on_alone
        self._rooms: dict[tuple[int, int], Tensor] = {}
        self._sums: dict[int, tuple[bytes, ...]] = {}
        self._local_steps = LocalSteps(spec, states, memory.moments)

    # one step ---------------------------------------------------------------------------------

    async def run(
        self, step: int, *, train: bool, evaluate: bool, replay: StageReplay | None = None
    ) -> LocalResult:
        """Compute a step up to the point where Prepared may be said; `replay`: what is left of it.

        Afterwards `reduced` has the reduced gradient of each layer; the gradient buffers still hold
        this peer's own. Where a peer does not send what is due, this waits until it is cancelled.
        """
        replay = replay or self.whole
        self._sums = {}
        self.mailbox.begin_step(step)
        self.frames.begin_step(step)
        self._recorder.begin(step, goes_on=replay.forwards > 0)
        await self._compute.run(self._start, step, replay)
        held_out_loss = 0.0
        if evaluate:
            held_out_loss = await self._microbatches.evaluate(step)
        if train:
            await self._train(step, replay)
        makes_losses = self._runner.has_head
        count = len(replay.microbatches) if train and makes_losses else 0
        held_out_count = len(self._microbatches.held_out) if evaluate and makes_losses else 0
        tokens = self._spec.batch.microbatch * self._spec.model.context
        norms = await self._compute.run(self._squared_norms)
        loss_sum = sum(self.work.losses.values(), 0.0)
        if not all(map(math.isfinite, [*norms.values(), loss_sum, held_out_loss])):
            raise NotFinite("a norm or a loss is not finite")
        return LocalResult(
            squared_norms=norms,
            loss_sum=loss_sum,
            sums={
                number: self._sums[segment.first_layer]
                for number, segment in self._segments.items()
                if segment.first_layer in self._sums
            },
            token_count=count * tokens,
            held_out_loss_sum=held_out_loss,
            held_out_token_count=held_out_count * tokens,
        )

    def _start(self, step: int, replay: StageReplay) -> None:
        """Take up what an attempt that was stopped has left, as far as it is kept."""
        self._memory.discard()
        self.reduced = {}
        if self._is_local:
            self._local_steps.abandon()
        self.work.use_recompute(self._recompute)
        if replay.forwards:
            self.work.go_on(step, replay.microbatches, replay.forwards, replay.backwards)
        else:
            self.work.begin(step)

    def _squared_norms(self) -> dict[int, float]:
        if not self.reduced:
            return dict.fromkeys(self._segments, 0.0)
        with self._runner.beside_passes():
            return {
                number: sum(squared_norm(self.reduced[layer]) for layer in segment.layers)
                for number, segment in self._segments.items()
            }

    async def _train(self, step: int, replay: StageReplay) -> None:
        """Compute and reduce at once, layer by layer."""
        reduction = StepReduction(
            step,
            self._segments,
            self.states,
            self._me,
            self._spec,
            self.mailbox,
            self.frames,
            self._compute,
            self._memory,
            self._recorder,
            self._rooms,
            self._on_alone,
        )
        try:
            if self._is_local:
                await self._train_locally(step, replay)
                for layer in reversed(self.states):
                    reduction.layer_is_final(layer)
            else:
                await self._microbatches.train(step, replay, reduction.layer_is_final)
            self.reduced = await reduction.finish()
            self._sums = reduction.sums
        finally:
            reduction.cancel()

    async def _train_locally(self, step: int, replay: StageReplay) -> None:
        """Inner steps; then the gradient buffers hold this pipeline's part of the difference.

        Nothing is kept of it if it fails: gradients of an inner step are used up at once.
        """
        assert not replay.forwards and len(replay.microbatches) == self._pipeline.microbatch_count
        await self._compute.run(self._local_steps.begin, step)
        groups = inner_microbatches(self._spec, self._pipeline.microbatches)
        for number, group in enumerate(groups):
            if len(group):
                self.work.begin_group()
                await self._microbatches.train(step, StageReplay(tuple(group)))
                await self._compute.run(self._local_steps.inner_step, number, len(group))
        await self._compute.run(self._local_steps.finish, self._pipeline.microbatch_count)
