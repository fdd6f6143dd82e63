"""The microbatches of a step on their way through one stage."""

import asyncio
from collections.abc import Callable
from typing import Any

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.pipeline_order import StageOrder, Tasklet, TaskletKind
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.mailbox import FrameKey, Mailbox
from p2p_dtfm.daemon.step_frames import StepFrames
from p2p_dtfm.daemon.step_recorder import StepRecorder
from p2p_dtfm.net.frames import FrameKind
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.stage import StageRunner

Tensor = Any
Batch = tuple[Tensor, Tensor]
"""int64 inputs and targets, each [sequences, tokens]."""
BatchOf = Callable[[int, int], Batch]
"""`batch(step, index)`: the tokens of a microbatch; called in the compute thread."""


class Microbatches:
    """Takes boundary tensors from the mailbox, computes, and sends what the neighbours wait for."""

    def __init__(
        self,
        mailbox: Mailbox,
        plan: Plan,
        me: str,
        spec: RunSpec,
        runner: StageRunner,
        batch: BatchOf,
        frames: StepFrames,
        compute: Compute,
        recorder: StepRecorder,
    ) -> None:
        place = plan.place_of(me)
        assert place is not None, "a spare has no microbatches"
        self._mailbox = mailbox
        self._me = me
        self._spec = spec
        self._runner = runner
        self._batch = batch
        self._frames = frames
        self._compute = compute
        self._recorder = recorder
        self._pipeline = plan.pipelines[place[0]]
        self._position = place[1]

    async def train(
        self,
        step: int,
        microbatches: range,
        on_final: Callable[[int], None] = lambda layer: None,
    ) -> float:
        """Forward and backward of each; returns the summed loss where the head is, else 0.

        `on_final(layer)` is called for each layer, the last one first, when all gradients of these
        microbatches are in its buffer.
        """
        order = StageOrder(
            microbatches,
            self._pipeline.stages[self._position].in_flight,
            makes_inputs=self._runner.has_embedding,
            makes_losses=self._runner.has_head,
            splits=self._runner.splits,
        )
        inputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        loss_sum = 0.0
        while not order.done:
            for key, payload in self._mailbox.take_arrivals(step, microbatches):
                try:
                    tensor = await self._boundary(key.kind, payload)
                    if key.kind is FrameKind.ACTIVATION:
                        order.input_arrived(key.index)
                        inputs[key.index] = tensor
                    else:
                        order.gradient_arrived(key.index)
                        gradients[key.index] = tensor
                except PeerFault as fault:
                    self._frames.on_trouble(key.sender, fault.cause)
            if order.only_weights_are_left:
                await self._weights_by_layer(order.take_weights(), on_final)
                break
            tasklet = order.next()
            if tasklet is None:
                with self._recorder.span("wait"):
                    await self._mailbox.wait_for_arrival()
            elif tasklet.kind is TaskletKind.FORWARD:
                loss_sum += await self._forward(step, tasklet, inputs)
            elif tasklet.kind is TaskletKind.WEIGHT:
                number = tasklet.microbatch
                weights = self._recorder.timed("backward", number, self._runner.weight_backward)
                await self._compute.run(weights, number)
            elif not order.splits and order.only_weights_are_left:
                await self._last_backward(step, tasklet.microbatch, gradients, on_final)
            else:
                await self._backward(step, tasklet, gradients)
        return loss_sum

    async def _forward(self, step: int, tasklet: Tasklet, inputs: dict[int, Tensor]) -> float:
        number = tasklet.microbatch
        entry = inputs.pop(number, None)
        forward = self._recorder.timed("forward", number, self._runner.forward)
        result = await self._compute.run(lambda: forward(number, *self._entry(step, number, entry)))
        if self._runner.has_head:
            return float(result)
        await self._send_boundary(step, FrameKind.ACTIVATION, number, result)
        return 0.0

    async def _backward(self, step: int, tasklet: Tasklet, gradients: dict[int, Tensor]) -> None:
        number = tasklet.microbatch
        gradient = gradients.pop(number, None)
        runner = self._runner
        part = runner.input_backward if runner.splits else runner.backward
        backward = self._recorder.timed("backward", number, part)
        result = await self._compute.run(lambda: backward(number, gradient))
        if result is not None:
            await self._send_boundary(step, FrameKind.ACTIVATION_GRADIENT, number, result)

    async def _last_backward(
        self,
        step: int,
        number: int,
        gradients: dict[int, Tensor],
        on_final: Callable[[int], None],
    ) -> None:
        """Layer by layer, so that other work of this peer's thread gets in between."""
        gradient = gradients.pop(number, None)
        backward = self._recorder.timed("backward", number, self._runner.backward_layer)
        for layer in reversed(self._runner.layer_states):
            gradient = await self._compute.run(backward, number, layer, gradient)
            on_final(layer)
            await asyncio.sleep(0)  # what is now to be done with it goes first
        if gradient is not None:
            await self._send_boundary(step, FrameKind.ACTIVATION_GRADIENT, number, gradient)

    async def _weights_by_layer(self, owed: range, on_final: Callable[[int], None]) -> None:
        """What splitting has left at the end: for each layer of all microbatches, in order."""
        for layer in reversed(self._runner.layer_states):
            for number in owed:
                part = self._runner.weight_backward_layer
                weights = self._recorder.timed("backward", number, part)
                await self._compute.run(weights, number, layer)
            on_final(layer)
            await asyncio.sleep(0)

    async def evaluate(self, step: int, numbers: range) -> float:
        """Held-out microbatches; returns the summed loss where the head is, else 0."""
        loss_sum = 0.0
        for number in numbers:
            entry = None
            if not self._runner.has_embedding:
                key = self._activation(step, number)
                with self._recorder.span("wait"):
                    payload = await self._mailbox.take(key)
                try:
                    entry = await self._boundary(key.kind, payload)
                except PeerFault as fault:
                    await self._frames.refuse(key.sender, fault)
            evaluate = self._recorder.timed("evaluate", number, self._runner.evaluate)
            result = await self._compute.run(
                lambda evaluate=evaluate, number=number, entry=entry: evaluate(
                    *self._entry(step, number, entry)
                )
            )
            if self._runner.has_head:
                loss_sum += float(result)
            else:
                await self._send_boundary(step, FrameKind.ACTIVATION, number, result)
        return loss_sum

    def _entry(self, step: int, number: int, activation: Tensor | None) -> tuple[Tensor, ...]:
        """The arguments of a forward: input, and targets where the head is. Compute thread."""
        needs_batch = self._runner.has_embedding or self._runner.has_head
        tokens, targets = self._batch(step, number) if needs_batch else (None, None)
        entry = tokens if activation is None else activation
        return (entry, targets) if self._runner.has_head else (entry,)

    async def _boundary(self, kind: FrameKind, payload: bytearray) -> Tensor:
        """Raises `PeerFault`."""
        spec = self._spec
        shape = (spec.batch.microbatch, spec.model.context, spec.model.width)
        codec = codec_of(self._mailbox.codec_of(kind), spec.codecs)
        if codec.lossless:
            return codec.decode(payload, shape)
        return await self._compute.run(codec.decode, payload, shape)

    def _activation(self, step: int, number: int) -> FrameKey:
        stage = self._pipeline.stages[self._position]
        before = self._pipeline.stages[self._position - 1]
        return FrameKey(step, FrameKind.ACTIVATION, stage.first_layer, number, before.peer_id)

    async def _send_boundary(self, step: int, kind: FrameKind, number: int, tensor: Tensor) -> None:
        forward = kind is FrameKind.ACTIVATION
        neighbour = self._pipeline.stages[self._position + (1 if forward else -1)]
        stage = self._pipeline.stages[self._position]
        layer = neighbour.first_layer if forward else stage.first_layer
        lane = "forward" if forward else "backward"
        boundaries = self._mailbox.wire.boundaries
        if forward:
            name = boundaries[self._me, neighbour.peer_id].activation
        else:
            name = boundaries[neighbour.peer_id, self._me].gradient
        codec = codec_of(name, self._spec.codecs)
        if codec.lossless and self._runner.copies.are_needed:
            leaving = await self._compute.run(self._runner.copies.to_host, tensor)
            tensor = await asyncio.to_thread(leaving.wait)
        payload = (
            codec.encode(tensor)
            if codec.lossless
            else await self._compute.run(codec.encode, tensor)
        )
        header = self._frames.header(step, kind, layer, number, tuple(tensor.shape), name)
        self._frames.send_later(neighbour.peer_id, lane, header, payload)
