"""One peer's part of a step: microbatches through its stage, and the reduction of its segments."""

import asyncio
import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from p2p_dtfm.core.audit.boundaries import beside
from p2p_dtfm.core.audit.judging import states_parameters
from p2p_dtfm.core.commit.step_terms import terms_of
from p2p_dtfm.core.recovery.partial_replay import StageReplay, whole_step
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.daemon.step.lane_frames import loss_frames
from p2p_dtfm.daemon.step.lent_parameters import begun_with
from p2p_dtfm.daemon.step.mailbox import segments_of
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.step.pipeline.open_step_work import OpenStepWork
from p2p_dtfm.daemon.step.reduction.step_reduction import Arrived, StepReduction
from p2p_dtfm.daemon.step.stage_account import StageAccount, account_of
from p2p_dtfm.daemon.step.stage_tools import (
    StageLinks,
    StageListeners,
    StagePlace,
    StageTools,
    tell_nobody,
)
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import NotFinite
from p2p_dtfm.train.stage.local_steps import LocalSteps, inner_microbatches
from p2p_dtfm.train.stage.replay.work import norms_by_holder
from p2p_dtfm.train.stage.tied_head import counted_once
from p2p_dtfm.train.updates.exact_sums import squared_norm

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
    """Digests of each holder's sums, by segment with other holders."""
    got: dict[int, Arrived] = field(default_factory=dict)
    """Digests of what came to be summed here, by the first layer of such a segment, in a run with
    audits."""
    tied: dict[int, bytes] = field(default_factory=dict)
    """`Prepared.tied`"""
    account: StageAccount | None = None
    """The account of this peer's own work, in a run with audits, where anything of the step is
    due."""
    norms: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """`Share.norms`"""


class StepEngine:
    """Steps of one view at one stage-holder.

    A peer that cannot be sent a tensor, or sends what is not due, is told of by `links.frames`; the
    step may then not end by itself.
    """

    def __init__(
        self,
        place: StagePlace,
        states: dict[int, LayerState],
        links: StageLinks,
        tools: StageTools,
        listeners: StageListeners | None = None,
        work: OpenStepWork | None = None,
    ) -> None:
        """`work` is of an earlier view, with the same states."""
        listeners, spec = listeners or StageListeners(), place.spec
        self.mailbox = links.mailbox
        self.view = links.mailbox.view
        self.states = states
        self.frames = links.frames
        self.work = work or OpenStepWork(tools.compute.stage_runner(spec, states, place.recompute))
        self.reduced: dict[int, Tensor] = {}
        """Reduced gradients by layer, from the end of a step's run until they are applied; the next
        step uses their memory again. The gradient buffers still hold this peer's own part."""
        self.whole = whole_step(place.plan, place.me)
        """This stage's part in a step of which nothing is done."""
        self._place = place
        self._spec = spec
        self._terms = terms_of(spec)
        self._links = links
        self._tools = tools
        self._runner = self.work.runner
        self._pipeline = place.pipeline
        self._is_local = spec.sync.mode == "local"
        # inner steps keep nothing of a step that fails, claims are of whole steps, and trimmed
        # sums count each holder's microbatches as planned: nobody is told of their progress
        is_trimmed = spec.sync.sums == "trimmed"
        repeats_whole = self._is_local or spec.audit.rate > 0 or is_trimmed
        told = tell_nobody if repeats_whole else listeners.progress
        if spec.audit.rate and self.work.edges is None:
            self.work.edges = {}
        self._microbatches = Microbatches(place, links, tools, self.work, told)
        self._segments = segments_of(place.plan, place.me)
        self._on_alone = listeners.alone
        self._rooms: dict[int, Tensor] = {}
        self._sums: dict[int, tuple[bytes, ...]] = {}
        self._tied: dict[int, bytes] = {}
        self._got: dict[int, Arrived] = {}
        self._account: StageAccount | None = None
        self._local_steps = LocalSteps(spec, states, tools.memory.moments)
        if (frames := loss_frames(spec, place.plan)) is not None:
            links.frames.tells = lambda *frame: (
                self.work.losses_told() if frames.has(place.me, *frame) else b""
            )

    @property
    def evaluates(self) -> bool:
        """Whether held-out microbatches go through this stage."""
        return bool(self._microbatches.held_out)

    # one step ---------------------------------------------------------------------------------

    async def run(
        self, step: int, *, train: bool, evaluate: bool, replay: StageReplay | None = None
    ) -> LocalResult:
        """Compute a step up to the point where Prepared may be said; `replay` is what is left of
        the step.

        Afterwards `reduced` has the reduced gradient of each layer; the gradient buffers still hold
        this peer's own. Where a peer does not send what is due, this waits until it is cancelled.
        """
        replay = replay or self.whole
        self._sums, self._got, self._account, self._tied = {}, {}, None, {}
        due = self._terms.due(step, self._place.plan)
        self.work.keeps_held_out = due is not None and due.held_out > 0
        self._forget_what_is_not_near(step)
        self._tools.recorder.begin(step, goes_on=replay.forwards > 0)
        await self._tools.compute.run(self._start, step, replay)
        held_out_loss = 0.0
        if evaluate:
            held_out_loss = await self._microbatches.evaluate(step)
            if due is not None and (due.held_out or not beside(self._place.plan, self._place.me)):
                self.work.held_out_loss_sum = held_out_loss
        if train:
            await self._train(step, replay)
        elif due is not None:
            began = await asyncio.to_thread(begun_with, self._place.plan, self.states)
            self._account = StageAccount({}, {}, self.work, began)
        makes_losses = self._runner.has_head
        count = len(replay.microbatches) if train and makes_losses else 0
        held_out_count = len(self._microbatches.held_out) if evaluate and makes_losses else 0
        tokens = self._spec.batch.microbatch * self._spec.model.context
        by_holder, norms = await self._tools.compute.run(self._squared_norms)
        loss_sum = added_up(self.work.losses.values())
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
            got=self._got,
            tied=self._tied,
            account=self._account,
            norms=by_holder,
            token_count=count * tokens,
            held_out_loss_sum=held_out_loss,
            held_out_token_count=held_out_count * tokens,
        )

    def _forget_what_is_not_near(self, step: int) -> None:
        """Forget frames of steps that are not near, and report the senders of those too far
        ahead."""
        for sender, early in self.mailbox.begin_step(step).items():
            self.frames.on_poison(sender, f"a tensor of step {early} before step {step}")
        self.frames.begin_step(step)

    def _start(self, step: int, replay: StageReplay) -> None:
        """Take up what a stopped attempt has left, as far as it is kept."""
        self._tools.memory.begin(self.view)
        self.reduced = {}
        if self._is_local:
            self._local_steps.abandon()
        self.work.use_recompute(self._place.recompute)
        if replay.forwards:
            self.work.go_on(step, replay.microbatches, replay.forwards, replay.backwards)
        else:
            self.work.begin(step)

    def _squared_norms(self) -> tuple[dict[int, tuple[float, ...]], dict[int, float]]:
        """Squared norms by segment: of what each holder has summed, where that is claimed, and of
        all."""
        if not self.reduced:
            return {}, dict.fromkeys(self._segments, 0.0)
        is_claimed = self._terms.audits and states_parameters(self._place.plan)
        by_holder, found = dict[int, tuple[float, ...]](), dict[int, float]()
        with self._runner.beside_passes():
            for number, segment in self._segments.items():
                if is_claimed and len(segment.holders) > 1:
                    chunks = self.mailbox.wire.chunks[segment.first_layer]
                    sums = self._rooms[segment.first_layer]
                    by_holder[number] = norms_by_holder(segment.holders, chunks, sums)
                    if not self._tied.keys() & set(segment.layers):
                        found[number] = added_up(by_holder[number])
                        continue
                found[number] = added_up(
                    squared_norm(counted_once(self._spec, layer, self.reduced[layer]))
                    for layer in segment.layers
                )
        return by_holder, found

    async def _train(self, step: int, replay: StageReplay) -> None:
        """Compute and reduce at once, layer by layer."""
        reduction = StepReduction(
            step, self._place, self.states, self._links, self._tools, self._rooms, self._on_alone
        )
        try:
            if self._is_local:
                await self._train_locally(step, replay)
                for layer in reversed(self.states):
                    reduction.layer_is_final(layer)
            else:
                self._microbatches.ends = reduction.fill
                await self._microbatches.train(step, replay, reduction.layer_is_final)
            accounting = self._begin_account()
            self.reduced = await reduction.finish()
            self._sums, self._got = reduction.sums, reduction.got
            self._tied = reduction.tied
            self._account = await accounting if accounting is not None else None
        finally:
            reduction.cancel()

    def _begin_account(self) -> "asyncio.Task[StageAccount] | None":
        """Make the account while the gradients travel, in a thread of its own: the sums must not
        wait for it."""
        if not self._spec.audit.rate:
            return None
        gradients = {layer: state.gradient_vector() for layer, state in self.states.items()}
        place, wire = self._place, self.mailbox.wire
        account = partial(account_of, place.plan, wire, place.me, gradients, self.work)
        return asyncio.create_task(asyncio.to_thread(account, self.states))

    async def _train_locally(self, step: int, replay: StageReplay) -> None:
        """Do the inner steps; then the gradient buffers hold this pipeline's part of the
        difference.

        Nothing is kept of it if it fails: gradients of an inner step are used up at once.
        """
        assert not replay.forwards and len(replay.microbatches) == self._pipeline.microbatch_count
        await self._tools.compute.run(self._local_steps.begin, step)
        groups = inner_microbatches(self._spec, self._pipeline.microbatches)
        for number, group in enumerate(groups):
            if len(group):
                self.work.begin_group()
                await self._microbatches.train(step, StageReplay(tuple(group)))
                await self._tools.compute.run(self._local_steps.inner_step, number, len(group))
        await self._tools.compute.run(self._local_steps.finish, self._pipeline.microbatch_count)
