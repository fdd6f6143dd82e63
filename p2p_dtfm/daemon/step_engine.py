"""One peer's part of a step: microbatches through its stage, then the reduction of its segments."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from p2p_dtfm.core.errors import PeerFault
from p2p_dtfm.core.pipeline_order import StageOrder, Tasklet, TaskletKind
from p2p_dtfm.core.plan import Plan, Segment
from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.daemon.compute import Compute
from p2p_dtfm.daemon.mailbox import (
    Chunks,
    FrameKey,
    Mailbox,
    held_out_indices,
    segments_of,
)
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.frames import FrameHeader, FrameKind, Payload
from p2p_dtfm.train.layer_state import LayerState
from p2p_dtfm.train.optimizer import squared_norm
from p2p_dtfm.train.reduction import (
    flatten_gradients,
    sum_parts,
    tensor_from_bytes,
    tensor_to_bytes,
    unflatten_gradients,
)

Tensor = Any
Batch = tuple[Tensor, Tensor]
"""int64 inputs and targets, each [sequences, tokens]."""


class Transport(Protocol):
    """What the engine needs of `net.bulk.BulkPlane`."""

    async def send(
        self, peer_id: str, lane: str, header: FrameHeader, payload: Payload
    ) -> None: ...


@dataclass(frozen=True)
class LocalResult:
    """What a stage-holder states in its Prepared."""

    squared_norms: dict[int, float]
    loss_sum: float
    token_count: int
    held_out_loss_sum: float
    held_out_token_count: int


class StepEngine:
    """Steps of one view at one stage-holder.

    `batch(step, index)` gives the tokens of a microbatch; indices from `microbatches_per_step` on
    are held-out ones. It runs in the compute thread. A peer that cannot be sent a tensor,
    or sends what is not due, is told to `on_trouble(peer_id, cause)`; the step may then not end by
    itself.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        plan: Plan,
        me: str,
        spec: RunSpec,
        states: dict[int, LayerState],
        batch: Callable[[int, int], Batch],
        transport: Transport,
        compute: Compute,
        on_trouble: Callable[[str, str], None],
    ) -> None:
        place = plan.place_of(me)
        assert place is not None, "a spare has no steps to compute"
        self.mailbox = mailbox
        self.view = mailbox.view
        self.states = states
        self._plan = plan
        self._me = me
        self._spec = spec
        self._batch = batch
        self._transport = transport
        self._compute = compute
        self._on_trouble = on_trouble
        self._sends: set[asyncio.Task[None]] = set()
        self._runner = compute.stage_runner(spec, states)
        self._pipeline = plan.pipelines[place[0]]
        self._position = place[1]
        self._held_out = held_out_indices(plan, spec, place[0])
        self._segments = segments_of(plan, me)
        self._chunks = mailbox.chunks

    def _states_of(self, segment: Segment) -> list[LayerState]:
        return [self.states[layer] for layer in segment.layers]

    # one step ---------------------------------------------------------------------------------

    async def run(self, step: int, *, train: bool, evaluate: bool) -> LocalResult:
        """Compute a step up to the point where Prepared may be said.

        Afterwards the gradient buffers of all layers hold the reduced gradient. Where a peer does
        not send what is due, this waits until it is cancelled.
        """
        self.mailbox.begin_step(step)
        await self._compute.run(self._runner.zero_gradients)
        self._runner.discard()
        held_out_loss = loss = 0.0
        if evaluate:
            held_out_loss = await self._evaluate(step)
        if train:
            loss = await self._train(step)
            await asyncio.gather(*(self._reduce(step, s) for s in self._segments.values()))
        makes_losses = self._runner.has_head
        count = self._pipeline.microbatch_count if train and makes_losses else 0
        held_out_count = len(self._held_out) if evaluate and makes_losses else 0
        tokens = self._spec.batch.microbatch * self._spec.model.context
        return LocalResult(
            squared_norms=await self._compute.run(self._squared_norms),
            loss_sum=loss,
            token_count=count * tokens,
            held_out_loss_sum=held_out_loss,
            held_out_token_count=held_out_count * tokens,
        )

    def _squared_norms(self) -> dict[int, float]:
        return {
            number: sum(squared_norm(s.gradient_vector()) for s in self._states_of(segment))
            for number, segment in self._segments.items()
        }

    # microbatches -----------------------------------------------------------------------------

    async def _train(self, step: int) -> float:
        order = StageOrder(
            self._pipeline.microbatches,
            self._pipeline.stages[self._position].in_flight,
            makes_inputs=self._runner.has_embedding,
            makes_losses=self._runner.has_head,
        )
        inputs: dict[int, Tensor] = {}
        gradients: dict[int, Tensor] = {}
        loss_sum = 0.0
        while not order.done:
            for key, payload in self.mailbox.take_arrivals(step, self._pipeline.microbatches):
                try:
                    if key.kind is FrameKind.ACTIVATION:
                        order.input_arrived(key.index)
                        inputs[key.index] = self._boundary(payload)
                    else:
                        order.gradient_arrived(key.index)
                        gradients[key.index] = self._boundary(payload)
                except PeerFault as fault:
                    self._on_trouble(key.sender, fault.cause)
            tasklet = order.next()
            if tasklet is None:
                await self.mailbox.wait_for_arrival()
            elif tasklet.kind is TaskletKind.FORWARD:
                loss_sum += await self._forward(step, tasklet, inputs)
            else:
                await self._backward(step, tasklet, gradients)
        return loss_sum

    async def _forward(self, step: int, tasklet: Tasklet, inputs: dict[int, Tensor]) -> float:
        number = tasklet.microbatch
        entry = inputs.pop(number, None)
        result = await self._compute.run(
            lambda: self._runner.forward(number, *self._entry(step, number, entry))
        )
        if self._runner.has_head:
            return float(result)
        self._send_boundary(step, FrameKind.ACTIVATION, number, result)
        return 0.0

    async def _backward(self, step: int, tasklet: Tasklet, gradients: dict[int, Tensor]) -> None:
        number = tasklet.microbatch
        gradient = gradients.pop(number, None)
        result = await self._compute.run(lambda: self._runner.backward(number, gradient))
        if result is not None:
            self._send_boundary(step, FrameKind.ACTIVATION_GRADIENT, number, result)

    async def _evaluate(self, step: int) -> float:
        loss_sum = 0.0
        for number in self._held_out:
            entry = None
            if not self._runner.has_embedding:
                entry = self._boundary(await self.mailbox.take(self._activation(step, number)))
            result = await self._compute.run(
                lambda number=number, entry=entry: self._runner.evaluate(
                    *self._entry(step, number, entry)
                )
            )
            if self._runner.has_head:
                loss_sum += float(result)
            else:
                self._send_boundary(step, FrameKind.ACTIVATION, number, result)
        return loss_sum

    def _entry(self, step: int, number: int, activation: Tensor | None) -> tuple[Tensor, ...]:
        """The arguments of a forward: input, and targets where the head is. Compute thread."""
        needs_batch = self._runner.has_embedding or self._runner.has_head
        tokens, targets = self._batch(step, number) if needs_batch else (None, None)
        entry = tokens if activation is None else activation
        return (entry, targets) if self._runner.has_head else (entry,)

    def _boundary(self, payload: bytearray) -> Tensor:
        spec = self._spec
        shape = (spec.batch.microbatch, spec.model.context, spec.model.width)
        return tensor_from_bytes(payload, shape)

    def _activation(self, step: int, number: int) -> FrameKey:
        stage = self._pipeline.stages[self._position]
        before = self._pipeline.stages[self._position - 1]
        return FrameKey(step, FrameKind.ACTIVATION, stage.first_layer, number, before.peer_id)

    def _send_boundary(self, step: int, kind: FrameKind, number: int, tensor: Tensor) -> None:
        forward = kind is FrameKind.ACTIVATION
        neighbour = self._pipeline.stages[self._position + (1 if forward else -1)]
        stage = self._pipeline.stages[self._position]
        layer = neighbour.first_layer if forward else stage.first_layer
        lane = "forward" if forward else "backward"
        header = self._header(step, kind, layer, number, tuple(tensor.shape))
        self._send_later(neighbour.peer_id, lane, header, tensor_to_bytes(tensor))

    # reduction --------------------------------------------------------------------------------

    async def _reduce(self, step: int, segment: Segment) -> None:
        """Give every holder of a segment the same sum of all holders' gradients.

        Each chunk has an owner; it adds the holders' parts in pipeline order and sends the sum to
        the others, so that all end with the owner's bytes.
        """
        if len(segment.holders) == 1:
            return
        chunks = self._chunks[segment.first_layer]
        states = self._states_of(segment)
        flat = await self._compute.run(flatten_gradients, states)
        exchanges = [
            self._exchange_chunk(step, segment, chunks, chunk, flat[start:end])
            for chunk, (start, end) in enumerate(chunks.bounds)
        ]
        await asyncio.gather(*exchanges)
        await self._compute.run(_store_gradients, flat, states)

    async def _exchange_chunk(
        self,
        step: int,
        segment: Segment,
        chunks: Chunks,
        chunk: int,
        part: Tensor,
    ) -> None:
        owner = chunks.owner(chunk)
        layer = segment.first_layer
        if owner != self._me:
            header = self._header(step, FrameKind.GRADIENT_PART, layer, chunk, tuple(part.shape))
            self._send_later(owner, "reduce", header, bytes(tensor_to_bytes(part)))
            key = FrameKey(step, FrameKind.GRADIENT_SUM, layer, chunk, owner)
            payload = await self.mailbox.take(key)
            part.copy_(tensor_from_bytes(payload, tuple(part.shape)))
            return
        parts = []
        for holder in segment.holders:
            if holder == self._me:
                parts.append(part)
                continue
            key = FrameKey(step, FrameKind.GRADIENT_PART, layer, chunk, holder)
            payload = await self.mailbox.take(key)
            parts.append(tensor_from_bytes(payload, tuple(part.shape)))
        total = await self._compute.run(sum_parts, parts)
        part.copy_(total)
        header = self._header(step, FrameKind.GRADIENT_SUM, layer, chunk, tuple(part.shape))
        for holder in segment.holders:
            if holder != self._me:
                self._send_later(holder, "reduce", header, tensor_to_bytes(total))

    def _send_later(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        """Sends outlive a step that is stopped: a frame cut short would cost the stream."""
        task = asyncio.create_task(self._send(peer_id, lane, header, payload))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, peer_id: str, lane: str, header: FrameHeader, payload: Payload) -> None:
        try:
            await self._transport.send(peer_id, lane, header, payload)
        except (Unreachable, Refused) as error:
            self._on_trouble(peer_id, error.cause)

    def _header(
        self, step: int, kind: FrameKind, layer: int, index: int, shape: tuple[int, ...]
    ) -> FrameHeader:
        return FrameHeader(
            view_number=self.view.number,
            view_digest=self.view.snapshot,
            step=step,
            kind=kind,
            index=index,
            layer=layer,
            codec="fp32",
            dtype="float32",
            shape=shape,
        )


def _store_gradients(flat: Tensor, states: list[LayerState]) -> None:
    for layer, part in unflatten_gradients(flat, states).items():
        state = next(state for state in states if state.layer == layer)
        state.gradient_vector().copy_(part)
