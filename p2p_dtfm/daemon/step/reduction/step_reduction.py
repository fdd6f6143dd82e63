"""One step's reduction of all segments that a peer holds, beside the rest of its backward."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any, NoReturn

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Segment
from p2p_dtfm.core.schedule.tied_ends import tied_ends
from p2p_dtfm.daemon.step.mailbox import FrameKey, Mailbox, segments_of
from p2p_dtfm.daemon.step.reduction.segment_exchange import exchange, together
from p2p_dtfm.daemon.step.reduction.tied_sums import TiedSums
from p2p_dtfm.daemon.step.stage_tools import OnAlone, StageLinks, StagePlace, StageTools
from p2p_dtfm.daemon.step.step_frames import StepFrames
from p2p_dtfm.net.streams.frames import FrameKind, Payload
from p2p_dtfm.train.codecs import codec_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.finite import NotFinite, is_finite
from p2p_dtfm.train.stage.host_copies import host_room, kept_on_host
from p2p_dtfm.train.stage.replay.work import chunk_digest
from p2p_dtfm.train.stage.segment_reduction import SegmentCut, SegmentReduction
from p2p_dtfm.train.stage.tied_head import tie
from p2p_dtfm.train.updates.trimmed_sums import trimmed_over

Tensor = Any
Arrived = dict[tuple[int, str], bytes]
"""Digests by chunk and sender."""


class StepReduction:
    """Call `layer_is_final` for each layer, in any order; `finish` when all are; `cancel` in any
    case.

    The layers' gradient buffers keep this peer's own sums.
    """

    def __init__(
        self,
        step: int,
        place: StagePlace,
        states: Mapping[int, LayerState],
        links: StageLinks,
        tools: StageTools,
        rooms: dict[int, Tensor],
        on_alone: OnAlone | None = None,
    ) -> None:
        """`rooms` belongs to the view and has memory for each segment's sums. The next step may use
        it again: it begins when this one is applied, and then nobody needs its sums. `on_alone` is
        told of each layer that nobody else holds."""
        self._on_alone = on_alone
        self._rooms = rooms
        self._step = step
        self._states = states
        self._me = place.me
        self._plan = place.plan
        self._mailbox = links.mailbox
        self._frames = links.frames
        self._compute = tools.compute
        self._memory = tools.memory
        self._recorder = tools.recorder
        self._spec = place.spec
        self._codec = codec_of(place.spec.codecs.reduction, place.spec.codecs)
        self._tied = tuple(end for end in tied_ends(place.spec) if end in states)
        self._tied_sums = TiedSums(step, place, links, tools) if self._tied else None
        self._final = {layer: asyncio.Event() for layer in states}
        self._begins: dict[int, asyncio.Event] = {}
        """By layer: set once any layer of its segment is final."""
        self._filled: set[int] = set()
        self._of_layer: dict[int, SegmentReduction] = {}
        self._reduced: dict[int, Tensor] = {}
        self.sums: dict[int, tuple[bytes, ...]] = {}
        """Digests of each holder's sums, by the first layer of a segment with other holders."""
        self.got: dict[int, Arrived] = {}
        """Digests of what came to be summed here, by the same layers, in a run with audits."""
        self._filling: set[asyncio.Task[None]] = set()
        held = segments_of(place.plan, place.me)
        self._segments = [asyncio.create_task(self._begin(s)) for s in held.values()]

    def layer_is_final(self, layer: int) -> None:
        """All microbatches' gradients are in the layer's buffer. What is now to be done with the
        layer comes before what the caller computes after its next turn of the event loop."""
        reduction = self._of_layer.get(layer)
        if reduction is None or layer in self._filled:
            self._mark_final(layer)
        else:
            self._filling.add(asyncio.create_task(self._fill(layer, reduction)))

    def fill(self, layer: int) -> None:
        """Fill in a layer that is about to be final, for a caller that is in the compute thread
        already. Compute thread."""
        if (reduction := self._of_layer.get(layer)) is not None:
            reduction.fill(layer, self._states[layer].gradient_vector())
            self._filled.add(layer)

    def _mark_final(self, layer: int) -> None:
        self._final[layer].set()
        if layer in self._begins:
            self._begins[layer].set()

    async def finish(self) -> dict[int, Tensor]:
        """The reduced gradient of each layer, flat fp32. For a layer without other holders it is
        the gradient buffer itself, if that is in host memory, nothing is owed and nobody is told of
        it."""
        await asyncio.gather(*self._filling, *self._segments)
        if self._tied_sums is not None:
            elsewhere = await self._tied_sums.give_and_take(self._reduced)
            self._reduced |= await self._compute.run(tie, self._spec, self._reduced, elsewhere)
            for layer in self._tied:
                if self._on_alone is not None and layer not in self._of_layer:
                    self._on_alone(self._step, layer, self._reduced[layer])
        return self._reduced

    @property
    def tied(self) -> dict[int, bytes]:
        """Digests of each end's sum of the matrix that both hold, where others are given one."""
        return self._tied_sums.digests if self._tied_sums is not None else {}

    def cancel(self) -> None:
        """Do no more; harmless after `finish`."""
        for task in (*self._filling, *self._segments):
            task.cancel()

    async def _fill(self, layer: int, reduction: SegmentReduction) -> None:
        gradient = self._states[layer].gradient_vector()
        await self._compute.run(reduction.fill, layer, gradient)
        self._mark_final(layer)

    async def _wait_for(self, layer: int) -> None:
        await self._final[layer].wait()

    def _begin(self, segment: Segment) -> Coroutine[Any, Any, None]:
        """Make a segment ready for its layers at once, whichever is final first."""
        states = [self._states[layer] for layer in segment.layers]
        owed = self._memory.owed_of(states)
        if len(segment.holders) == 1:
            return self._keep(segment, states, owed)
        chunks = self._mailbox.wire.chunks[segment.first_layer]
        if segment.first_layer not in self._rooms:
            elements = sum(state.parameter_count for state in states)
            self._rooms[segment.first_layer] = host_room(elements, states[0].device)
        reduction = SegmentReduction(
            self._spec,
            self._codec,
            self._step,
            SegmentCut(
                segment.first_layer,
                chunks.bounds,
                [state.parameter_count for state in states],
                trimmed_over(self._spec, self._plan, segment),
            ),
            owed,
            self._rooms[segment.first_layer],
        )
        self._of_layer |= dict.fromkeys(segment.layers, reduction)
        self._begins |= dict.fromkeys(segment.layers, asyncio.Event())
        return self._reduce(segment, states, chunks, reduction)

    async def _reduce(
        self,
        segment: Segment,
        states: list[LayerState],
        chunks: Chunks,
        reduction: SegmentReduction,
    ) -> None:
        """Give every holder of a segment the same sum of all holders' gradients."""
        courses = _Courses(
            self._mailbox, self._frames, self._step, segment.first_layer, self._codec.name
        )
        if self._spec.audit.rate:
            courses.got = self.got.setdefault(segment.first_layer, {})
        await self._any_final(segment)
        with self._recorder.span("reduce", segment.first_layer):
            self.sums[segment.first_layer] = await exchange(
                reduction,
                self._me,
                segment.holders,
                chunks.owners,
                courses,
                self._compute,
                self._wait_for,
            )
        await courses.all_got()
        self._reduced |= reduction.reduced_layers()
        if reduction.owed is not None:
            self._memory.propose_owed(self._step, states, reduction.owed)

    async def _any_final(self, segment: Segment) -> None:
        """A backward ends its last layer first."""
        await self._begins[segment.first_layer].wait()

    async def _keep(self, segment: Segment, states: list[LayerState], owed: Tensor | None) -> None:
        """Nobody else holds these layers: what was once owed to others is used here."""
        counts = [state.parameter_count for state in states]
        parts = [None] * len(states) if owed is None else owed.split(counts)
        await together(map(self._keep_layer, states, parts))
        if owed is not None:
            self._memory.propose_owed(self._step, states, owed * 0.0)

    async def _keep_layer(self, state: LayerState, owed: Tensor | None) -> None:
        """The copy for others is made at once, so that it can be on its way while the rest of the
        backward goes on."""
        await self._wait_for(state.layer)
        gradient = state.gradient_vector()
        if not await self._compute.run(is_finite, gradient):
            raise NotFinite(f"the gradient of layer {state.layer} is not finite")
        if owed is not None:
            gradient = await self._compute.run(lambda: gradient + owed.to(gradient.device))
        is_tied = state.layer in self._tied  # others are told once it is whole
        is_to_stay = owed is None and self._on_alone is not None and not is_tied
        if is_to_stay or state.device.type != "cpu":  # sums lie in host memory in any case
            gradient = await self._compute.run(kept_on_host, gradient)
        if is_tied:
            self._reduced[state.layer] = gradient
            return
        self._reduced[state.layer] = gradient
        if self._on_alone is not None:
            self._on_alone(self._step, state.layer, gradient)


class _Courses:
    """The frames of one segment's reduction in one step: `segment_exchange.Courses`."""

    def __init__(
        self, mailbox: Mailbox, frames: StepFrames, step: int, layer: int, codec: str
    ) -> None:
        self._mailbox = mailbox
        self._frames = frames
        self._step = step
        self._layer = layer
        self._codec = codec
        self.got: Arrived | None = None
        self._digesting: list[asyncio.Task[None]] = []

    async def send(
        self, peer_id: str, kind: FrameKind, chunk: int, elements: int, payload: Payload
    ) -> None:
        header = self._frames.header(self._step, kind, self._layer, chunk, (elements,), self._codec)
        self._frames.send_later(peer_id, "reduce", header, payload)

    async def take(self, peer_id: str, kind: FrameKind, chunk: int) -> bytearray:
        key = FrameKey(self._step, kind, self._layer, chunk, peer_id)
        payload = await self._mailbox.take(key)
        if self.got is not None and kind is FrameKind.GRADIENT_PART:
            self._digesting.append(asyncio.create_task(self._digest(self.got, key, payload)))
        return payload

    async def _digest(self, got: Arrived, key: FrameKey, payload: bytearray) -> None:
        """Beside what is made of the payload, which stays as it is."""
        got[key.index, key.sender] = await asyncio.to_thread(chunk_digest, payload)

    async def all_got(self) -> None:
        """Wait until `got` is complete, once all has been taken."""
        await asyncio.gather(*self._digesting)

    async def blame_and_wait(self, peer_id: str, fault: PeerFault) -> NoReturn:
        """The payload was not changed on its way, so the fault is the sender's and not the
        link's."""
        await self._frames.blame_and_wait(peer_id, fault)
