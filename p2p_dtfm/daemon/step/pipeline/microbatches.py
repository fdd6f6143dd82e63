"""The microbatches of a step on their way through one stage."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.recovery.partial_replay import StageReplay, whole_step
from p2p_dtfm.core.schedule.pipeline_order import Done, StageOrder
from p2p_dtfm.core.schedule.tasklets import Tasklet, TaskletKind
from p2p_dtfm.daemon.step.mailbox import FrameKey
from p2p_dtfm.daemon.step.pipeline.open_step_work import Arrived, OpenStepWork, Outgoing, Unfinished
from p2p_dtfm.daemon.step.pipeline.stage_boundary import StageBoundary
from p2p_dtfm.daemon.step.stage_tools import OnProgress, StageLinks, StagePlace, StageTools
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.stage.finite import NotFinite

Tensor = Any
Result = TypeVar("Result")

_BOUNDARY_OF = {
    TaskletKind.FORWARD: FrameKind.ACTIVATION,
    TaskletKind.BACKWARD: FrameKind.ACTIVATION_GRADIENT,
}


class _Begun(NamedTuple):
    """A tasklet that the compute thread runs, or will."""

    tasklet: Tasklet
    running: "asyncio.Task[Outgoing | None]"


class Microbatches:
    """Takes boundary tensors from the mailbox, computes, and sends what the neighbours wait for.

    `on_progress(step, progress)` is told of all that `work` keeps, before another forward or
    backward is begun.
    """

    def __init__(
        self,
        place: StagePlace,
        links: StageLinks,
        tools: StageTools,
        work: OpenStepWork,
        on_progress: OnProgress,
    ) -> None:
        self._mailbox = links.mailbox
        self._spec = place.spec
        self._work = work
        self._runner = work.runner
        self._batch = tools.batch
        self._weight_of = tools.weight
        self._frames = links.frames
        self._compute = tools.compute
        self._recorder = tools.recorder
        self._on_progress = on_progress
        self._stage = place.stage
        self._boundary = StageBoundary(place, links, tools, work.runner)
        self._replay = whole_step(place.plan, place.me)
        self._step = 0
        self.ends: Callable[[int], None] = lambda layer: None
        """Called in the compute thread, before `on_final`, for some of the layers."""

    async def train(
        self,
        step: int,
        replay: StageReplay,
        on_final: Callable[[int], None] = lambda layer: None,
    ) -> None:
        """Do the forward and backward of each microbatch that `work` has not done yet.
        `on_final(layer)` is called, for the last layer first, when all gradients of that layer are
        in its buffer."""
        self._replay, self._step = replay, step
        self._boundary.begin(replay)
        work, places = self._work, {number: n for n, number in enumerate(replay.microbatches)}
        if work.unfinished is not None:
            await self._compute.run(work.do, self._finish_backward)
        order = self._order(places)
        not_final = dict.fromkeys(reversed(self._runner.layer_states))

        def note_final(layer: int) -> None:
            del not_final[layer]
            on_final(layer)

        self._on_progress(step, work.progress)
        await self._send_kept(step, replay)
        work.drop_if_too_large()
        tensors = Arrived()
        ahead: _Begun | None = None
        try:
            while not order.done:
                await self._take_arrivals(step, places, order, tensors)
                if ahead is None and order.only_weights_are_left:
                    owed = [replay.microbatches[place] for place in order.take_weights()]
                    await self._weights_by_layer(owed, note_final)
                    break
                begun, ahead = ahead, None
                if begun is None:
                    tasklet = order.next()
                    if tasklet is None:
                        with self._recorder.span("wait"):
                            await self._mailbox.wait_for_arrival(self._awaited(step, order))
                        continue
                    if not order.splits and order.only_weights_are_left:
                        await self._end_backwards(step, tasklet, tensors, note_final)
                        continue
                    begun = self._begin(step, tasklet, tensors)
                ahead = self._look_ahead(step, begun.tasklet, order, tensors)
                sent = await self._unless_poisoned(begun.running)
                if begun.tasklet.kind is not TaskletKind.WEIGHT:
                    self._say(step)
                    self._send_if_missing(step, begun.tasklet, sent)
        finally:
            if ahead is not None:
                ahead.running.cancel()
        for layer in list(not_final):  # where all was done before
            note_final(layer)

    def _order(self, places: Mapping[int, int]) -> StageOrder:
        """The order of this step's tasklets; `places` are the positions of its microbatches in
        it."""
        work = self._work
        sent = {places[number] for number in self._replay.next_may_have}
        return StageOrder(
            range(len(places)),
            self._stage.in_flight,
            makes_inputs=self._runner.has_embedding,
            makes_losses=self._runner.has_head,
            splits=self._runner.splits,
            done=Done(len(work.forwarded), work.backwards, work.weights, sent),
        )

    def _awaited(self, step: int, order: StageOrder) -> FrameKey:
        """The frame without which nothing can be computed."""
        kind, place = order.lacks
        number = self._replay.microbatches[place]
        if kind is TaskletKind.FORWARD:
            return self._boundary.activation_key(step, number)
        return self._boundary.gradient_key(step, number)

    async def _unless_poisoned(self, work: Awaitable[Result]) -> Result:
        """The result of `work`. From what no correct neighbour sends nothing is made: its sender is
        blamed, and the step does not go on."""
        try:
            return await work
        except PeerFault as fault:
            assert fault.peer_id, "it is a neighbour"
            await self._frames.blame_and_wait(fault.peer_id, fault)

    def _begin(self, step: int, tasklet: Tasklet, tensors: Arrived) -> "_Begun":
        """Give a tasklet to the compute thread, behind what it has to do already."""
        place, number = tasklet.microbatch, self._replay.microbatches[tasklet.microbatch]
        run, do = self._compute.run, self._work.do
        if tasklet.kind is TaskletKind.FORWARD:
            work = run(do, self._forward, step, number, tensors.inputs.pop(place, None))
        elif tasklet.kind is TaskletKind.BACKWARD:
            work = run(do, self._backward, number, tensors.gradients.pop(place, None))
        else:
            work = run(self._weight, number)
        return _Begun(tasklet, asyncio.create_task(work))

    def _look_ahead(
        self, step: int, under_way: Tasklet, order: StageOrder, tensors: Arrived
    ) -> "_Begun | None":
        """Begin what surely comes after `under_way`: then the compute thread goes on at once, and
        does not wait for the event loop. But a tasklet that is told of as progress begins only
        after all before it were told of."""
        if not order.splits:
            return None
        after = order.next_for_sure(only_weight=under_way.kind is not TaskletKind.WEIGHT)
        return None if after is None else self._begin(step, after, tensors)

    async def _end_backwards(
        self, step: int, tasklet: Tasklet, tensors: Arrived, note_final: Callable[[int], None]
    ) -> None:
        """The last backward of a stage that does not split."""
        number = self._replay.microbatches[tasklet.microbatch]
        gradient = tensors.gradients.pop(tasklet.microbatch, None)
        sent = await self._last_backward(number, gradient, note_final)
        self._say(step)
        # before the last layer's own gradient sets out: the stage before waits for nothing else
        self._send_if_missing(step, tasklet, sent)
        note_final(min(self._runner.layer_states))

    def _send_if_missing(self, step: int, tasklet: Tasklet, sent: Outgoing | None) -> None:
        """Send a tasklet's tensor to the neighbour, unless the neighbour has kept what came of
        it."""
        number = self._replay.microbatches[tasklet.microbatch]
        is_forward = tasklet.kind is TaskletKind.FORWARD
        kept = self._replay.next_has if is_forward else self._replay.previous_has
        if sent is not None and number not in kept:
            self._boundary.send(step, _BOUNDARY_OF[tasklet.kind], number, sent)

    def _say(self, step: int) -> None:
        self._on_progress(step, self._work.progress)
        self._work.drop_if_too_large()

    async def _take_arrivals(
        self, step: int, places: Mapping[int, int], order: StageOrder, tensors: Arrived
    ) -> None:
        for key, payload in self._mailbox.take_arrivals(step, places):
            try:
                await self._arrived(key, payload, places[key.index], order, tensors)
            except PeerFault as fault:
                self._frames.on_poison(key.sender, fault.cause)

    async def _arrived(
        self, key: FrameKey, payload: bytearray, place: int, order: StageOrder, tensors: Arrived
    ) -> None:
        """Take in a frame that has come. Raises `PeerFault`.

        Others cannot always know what is done here, and may send it once more: then it is not
        needed.
        """
        is_input = key.kind is FrameKind.ACTIVATION
        if place < (len(self._work.forwarded) if is_input else self._work.backwards):
            return
        await self._work.came(key.kind, key.index, payload)
        tensor = await self._boundary.decoded(key, payload)
        if is_input:
            order.input_arrived(place)
            tensors.inputs[place] = tensor
        else:
            order.gradient_arrived(place)
            tensors.gradients[place] = tensor

    def _forward(self, step: int, number: int, entry: Tensor | None) -> Outgoing | None:
        """Compute thread."""
        forward = self._recorder.timed("forward", number, self._runner.forward)
        result = forward(number, *self._entry(step, number, entry))
        if self._runner.has_head:
            weight = self._weight_of(step, number)
            self._runner.weigh(number, weight)
            loss = float(result) * weight
            if not math.isfinite(loss):
                raise NotFinite(f"the loss of microbatch {number} is not finite")
            self._work.forward_done(number, None, loss)
            return None
        sent = self._boundary.outgoing(step, FrameKind.ACTIVATION, number, result)
        self._work.forward_done(number, sent, None)
        return sent

    def _backward(self, number: int, gradient: Tensor | None) -> Outgoing | None:
        """Compute thread."""
        self._boundary.require_finite(FrameKind.ACTIVATION_GRADIENT, number, gradient)
        part = self._runner.input_backward if self._runner.splits else self._runner.backward
        result = self._recorder.timed("backward", number, part)(number, gradient)
        return self._backward_done(number, result)

    def _weight(self, number: int) -> None:
        """Compute thread."""
        self._recorder.timed("backward", number, self._runner.weight_backward)(number)

    def _backward_done(self, number: int, gradient: Tensor | None) -> Outgoing | None:
        kind, step = FrameKind.ACTIVATION_GRADIENT, self._step
        sent = None if gradient is None else self._boundary.outgoing(step, kind, number, gradient)
        self._work.backward_done(number, sent)
        return sent

    async def _send_kept(self, step: int, replay: StageReplay) -> None:
        """Send what neighbours have lost, or never got, of what is done here."""
        work = self._work
        due: list[tuple[FrameKind, int]] = []
        if not self._runner.has_head:
            due += [(FrameKind.ACTIVATION, n) for n in work.forwarded if n not in replay.next_has]
        if not self._runner.has_embedding:
            done = (n for n in work.forwarded[: work.backwards] if n not in replay.previous_has)
            due += [(FrameKind.ACTIVATION_GRADIENT, n) for n in done]
        for kind, number in due:
            sent = work.kept(kind, number)
            if sent.codec != self._boundary.codec(kind, number):
                sent = await self._compute.run(self._boundary.again, step, kind, number, sent)
            self._boundary.send(step, kind, number, sent)

    async def _last_backward(
        self, number: int, gradient: Tensor | None, note_final: Callable[[int], None]
    ) -> Outgoing | None:
        """The last backward, layer by layer, so that other work of this peer's thread gets in
        between. Afterwards all layers but the first are final."""
        sent: Outgoing | None = None
        first = min(self._runner.layer_states)
        for layer in reversed(self._runner.layer_states):
            backward = self._backward_layer if layer == first else self._end_layer
            work = self._compute.run(self._work.do, backward, number, layer, gradient)
            sent = await self._unless_poisoned(work)
            gradient = None
            if layer != first:
                note_final(layer)
                await asyncio.sleep(0)  # what is now to be done with this layer goes first
        return sent

    def _end_layer(self, number: int, layer: int, gradient: Tensor | None) -> None:
        """A layer's last backward, and at once what comes after it in this thread. Compute
        thread."""
        self._backward_layer(number, layer, gradient)
        self.ends(layer)

    def _backward_layer(self, number: int, layer: int, gradient: Tensor | None) -> Outgoing | None:
        """Takes the gradient that the layer above has left, or, at the last layer, `gradient`.
        Compute thread."""
        self._boundary.require_finite(FrameKind.ACTIVATION_GRADIENT, number, gradient)
        backward = self._recorder.timed("backward", number, self._runner.backward_layer)
        unfinished = self._work.unfinished
        result = backward(number, layer, gradient if unfinished is None else unfinished.gradient)
        if layer > min(self._runner.layer_states):
            self._work.unfinished = Unfinished(number, layer, result)
            return None
        self._work.unfinished = None
        return self._backward_done(number, result)

    def _finish_backward(self) -> None:
        """Finish a backward that was stopped between two layers. Compute thread."""
        while (unfinished := self._work.unfinished) is not None:
            self._backward_layer(unfinished.microbatch, unfinished.layer - 1, None)

    async def _weights_by_layer(
        self, owed: Sequence[int], note_final: Callable[[int], None]
    ) -> None:
        """The gradients that split backwards still owe at the end: layer by layer, of all
        microbatches in order."""
        for layer in reversed(self._runner.layer_states):
            for number in owed:
                part = self._runner.weight_backward_layer
                weights = self._recorder.timed("backward", number, part)
                await self._compute.run(weights, number, layer)
            note_final(layer)
            await asyncio.sleep(0)

    @property
    def held_out(self) -> list[int]:
        """The held-out microbatches that go through this stage."""
        return self._boundary.held_out

    async def evaluate(self, step: int) -> float:
        """Compute the held-out microbatches, in their order. Returns their summed loss where the
        head is, else 0."""
        loss_sum, entry, kind = 0.0, None, FrameKind.ACTIVATION
        for number in self._boundary.held_out:
            if not self._runner.has_embedding:
                key = self._boundary.activation_key(step, number)
                with self._recorder.span("wait"):
                    payload = await self._mailbox.take(key)
                await self._work.came(key.kind, number, payload)
                try:
                    entry = await self._boundary.decoded(key, payload)
                except PeerFault as fault:
                    await self._frames.blame_and_wait(key.sender, fault)
            work = self._compute.run(self._evaluate, step, number, entry)
            result = await self._unless_poisoned(work)
            if self._runner.has_head:
                loss_sum += float(result)
            else:
                neighbour = self._boundary.neighbour(kind, number).peer_id
                sent = await self._compute.run(self._boundary.outgoing, step, kind, number, result)
                if self._work.keeps_held_out:
                    await self._compute.run(self._work.evaluated, number, sent)
                self._boundary.send(step, kind, number, sent)
                await self._frames.few_are_left_for(neighbour, self._stage.in_flight)
        return loss_sum

    def _evaluate(self, step: int, number: int, activation: Tensor | None) -> Tensor | float:
        """Compute thread."""
        evaluate = self._recorder.timed("evaluate", number, self._runner.evaluate)
        result = evaluate(*self._entry(step, number, activation))
        return result * self._weight_of(step, number) if self._runner.has_head else result

    def _entry(self, step: int, number: int, activation: Tensor | None) -> tuple[Any, ...]:
        """The arguments of a forward: input, targets where the head is, and the tokens themselves
        where every stage knows them. Compute thread."""
        knows = self._spec.stages_know_tokens
        needs_batch = self._runner.has_embedding or self._runner.has_head or knows
        tokens, targets = self._batch(step, number) if needs_batch else (None, None)
        self._boundary.require_finite(FrameKind.ACTIVATION, number, activation)
        entry = tokens if activation is None else activation
        if knows:
            return entry, targets if self._runner.has_head else None, tokens
        return (entry, targets) if self._runner.has_head else (entry,)
