"""What this peer has computed of the open step: kept until the step commits, whatever fails.

It belongs to the peer's stage, not to a view: where a later view lets the stage go on, nothing is
computed twice, and what a replaced neighbour lost is sent again from here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar

from p2p_dtfm.core.audit.boundaries import KEPT_LIMIT_BYTES
from p2p_dtfm.core.audit.told_losses import losses_digest
from p2p_dtfm.core.messages.stage_progress import StageProgress, as_runs
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.net.streams.frames import FrameKind, Payload
from p2p_dtfm.ports import rarely
from p2p_dtfm.train.stage.finite import NotFinite
from p2p_dtfm.train.stage.replay.work import chunk_digest
from p2p_dtfm.train.stage.stage_runner import StageRunner

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Tensor = Any


class Outgoing(NamedTuple):
    """A boundary tensor as it is sent."""

    codec: str
    payload: Payload


@dataclass(frozen=True)
class Arrived:
    """Tensors for tasklets that have not begun, by the microbatch's place in the order."""

    inputs: dict[int, Tensor] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)


class Unfinished(NamedTuple):
    """A backward that has gone through the layers from the last one to `layer`."""

    microbatch: int
    layer: int
    gradient: Tensor
    """The gradient of the input of `layer`."""


class OpenStepWork:
    """One step's work at one stage. Changed in the compute thread only, so that a tasklet that ends
    after its step was stopped is still counted."""

    def __init__(self, runner: StageRunner, limit_bytes: int = KEPT_LIMIT_BYTES) -> None:
        self.runner = runner
        self.step: int | None = None
        self.forwarded: list[int] = []
        self.backwards = 0
        """How many of `forwarded`, counted from the first, have had their backward."""
        self.unfinished: Unfinished | None = None
        """The next backward, if it was stopped between two layers."""
        self.losses: dict[int, float] = {}
        """Summed over the tokens of each microbatch, where the head is."""
        self.held_out_loss_sum = 0.0
        """Summed over the held-out microbatches, where the head is and they are part of the
        work."""
        # a step that sends more is not kept if it fails, and its neighbours are not audited
        self._limit_bytes = limit_bytes
        self._sent: dict[tuple[FrameKind, int], Outgoing] = {}
        self._sent_bytes = 0
        self._keeps = True
        self._spoilt_by = ""
        """What is not finite in a tasklet that was broken off; empty if none was."""
        self.edges: dict[tuple[FrameKind, int, bool], bytes] | None = None
        """With audits: digests of the frames that came and (True) of those that were sent."""
        self.keeps_held_out = False
        """Whether held-out activations that were sent are kept, too: others may compute them
        again."""

    def use_recompute(self, recompute: bool) -> None:
        """Recompute activations or not, as the view asks of the stage's memory. A stage that
        recomputes does not split its backwards, so nothing may be owed then."""
        if recompute != self.runner.recompute:
            for number in self.forwarded[: self.backwards]:
                self.runner.weight_backward(number)
            self.runner.recompute = recompute

    def begin(self, step: int) -> None:
        """Nothing of the step is done: forget all, and start with zero gradients."""
        self.step = step
        self.runner.discard()
        self.runner.zero_gradients()
        self._forget()
        # with audits all know by the plan whose work is kept
        self._keeps = self.edges is not None or not rarely.happens("nothing kept")

    def begin_group(self) -> None:
        """With local steps: what was done before is used up; only its losses count."""
        self.forwarded, self.backwards, self.unfinished = [], 0, None
        self._sent, self._sent_bytes = {}, 0

    def _forget(self) -> None:
        self.begin_group()
        self.losses, self.held_out_loss_sum = {}, 0.0
        self._spoilt_by = ""
        if self.edges is not None:
            self.edges = {}

    def go_on(self, step: int, microbatches: Sequence[int], forwards: int, backwards: int) -> None:
        """Go on with other microbatches after the first `forwards`, which are kept here. Raises
        `NotFinite` if the work is spoilt."""
        if self._spoilt_by:
            raise NotFinite(self._spoilt_by)
        same = 0
        while same < min(len(self.forwarded), len(microbatches)):
            if self.forwarded[same] != microbatches[same]:
                break
            same += 1
        assert self.step == step, (self.step, step)
        touched = self.backwards + (self.unfinished is not None)
        assert backwards <= self.backwards and max(forwards, touched) <= same, (
            f"{self.forwarded} with {self.backwards} backwards cannot go on as {microbatches} "
            f"with {forwards} and {backwards} kept"
        )
        for number in self.forwarded[same:]:
            self.runner.forget(number)
            self.losses.pop(number, None)
            sent = self._sent.pop((FrameKind.ACTIVATION, number), None)
            self._sent_bytes -= memoryview(sent.payload).nbytes if sent is not None else 0
        del self.forwarded[same:]

    def end(self) -> None:
        """The step has committed: its tensors are not needed any more."""
        self.step = None
        self._forget()

    # tasklets -----------------------------------------------------------------------------------

    def do(
        self,
        tasklet: Callable[Parameters, Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """The result of a tasklet. If it raises `NotFinite`, it has left graphs or gradients that
        no count tells of. The step may be stopped before anybody hears of that, so it is noted
        here."""
        try:
            return tasklet(*args, **kwargs)
        except NotFinite as found:
            self._spoilt_by = str(found)
            raise

    def forward_done(self, microbatch: int, sent: Outgoing | None, loss: float | None) -> None:
        self.forwarded.append(microbatch)
        if loss is not None:
            self.losses[microbatch] = loss
        self._keep(FrameKind.ACTIVATION, microbatch, sent)

    def backward_done(self, microbatch: int, sent: Outgoing | None) -> None:
        assert self.forwarded[self.backwards] == microbatch, (self.forwarded, self.backwards)
        self.backwards += 1
        self.unfinished = None
        self._keep(FrameKind.ACTIVATION_GRADIENT, microbatch, sent)

    def evaluated(self, microbatch: int, sent: Outgoing) -> None:
        """A held-out microbatch is done, before any that trains."""
        self._keep(FrameKind.ACTIVATION, microbatch, sent)

    async def came(self, kind: FrameKind, microbatch: int, payload: Payload) -> None:
        """Call it before anything is made of a frame: with audits this peer claims what the frame
        was."""
        if self.edges is not None:
            digest = await asyncio.to_thread(chunk_digest, payload)
            self.edges[kind, microbatch, False] = digest

    def _keep(self, kind: FrameKind, microbatch: int, sent: Outgoing | None) -> None:
        if sent is not None and self.edges is not None:
            self.edges[kind, microbatch, True] = chunk_digest(sent.payload)
        if sent is None or not self._keeps:
            return
        self._sent[kind, microbatch] = sent
        self._sent_bytes += memoryview(sent.payload).nbytes
        if self._sent_bytes > self._limit_bytes:
            self._keeps = False

    def drop_if_too_large(self) -> None:
        """Call it once `progress` is said: until then others may count on what was said before
        it."""
        if not self._keeps:
            self._sent, self._sent_bytes = {}, 0

    def losses_told(self) -> bytes:
        """What others are told of the losses, once all forwards are done."""
        return losses_digest(added_up(self.losses.values()), self.held_out_loss_sum)

    @property
    def weights(self) -> int:
        """How many of `forwarded`, counted from the first, owe no gradients of matrices (see
        `StageRunner.splits`)."""
        count = 0
        while count < self.backwards and not self.runner.owes(self.forwarded[count]):
            count += 1
        return count

    def find(self, digest: bytes) -> bytes | None:
        """A frame that was sent and is kept, by its digest."""
        for (kind, number, is_sent), each in (self.edges or {}).items():
            if is_sent and each == digest and (kind, number) in self._sent:
                return bytes(memoryview(self._sent[kind, number].payload).cast("B"))
        return None

    def kept(self, kind: FrameKind, microbatch: int) -> Outgoing:
        """What was sent for a microbatch."""
        return self._sent[kind, microbatch]

    @property
    def progress(self) -> StageProgress | None:
        """What the next view may count on. None if nothing is done, or too much to be kept."""
        if not self.forwarded or not self._keeps:
            return None
        layers = sorted(self.runner.layer_states)
        runs = as_runs(self.forwarded)
        return StageProgress(layers[0], layers[-1] + 1, runs, self.backwards)
