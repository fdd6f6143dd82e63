"""What crosses the boundaries of a stage: activations and their gradients. It says from which
neighbour they come and to which they go, in which codec, and within which limits."""

from typing import Any

from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Stage
from p2p_dtfm.core.recovery.partial_replay import StageReplay, whole_step
from p2p_dtfm.daemon.step.mailbox import FrameKey
from p2p_dtfm.daemon.step.neighbours import held_out_of, neighbours_of
from p2p_dtfm.daemon.step.pipeline.open_step_work import Outgoing
from p2p_dtfm.daemon.step.stage_tools import StageLinks, StagePlace, StageTools
from p2p_dtfm.net.streams.frames import FrameKind
from p2p_dtfm.train.codecs import Turn, boundary_turn, codec_of
from p2p_dtfm.train.stage.finite import CODEC_TIMES, NotFinite, boundary_limit, is_within
from p2p_dtfm.train.stage.stage_runner import StageRunner

Tensor = Any


class StageBoundary:
    """The boundaries at all places of one peer in a plan; the step says which place a microbatch
    takes."""

    def __init__(
        self, place: StagePlace, links: StageLinks, tools: StageTools, runner: StageRunner
    ) -> None:
        self._mailbox = links.mailbox
        self._frames = links.frames
        self._me = place.me
        self._spec = place.spec
        self._stage = place.stage
        self._compute = tools.compute
        self._runner = runner
        self._neighbours = neighbours_of(place.plan, place.me, place.spec)
        self._replay = whole_step(place.plan, place.me)

    def begin(self, replay: StageReplay) -> None:
        """Begin a step, or go on with what is left of one."""
        self._replay = replay

    @property
    def held_out(self) -> list[int]:
        """The held-out microbatches that go through this stage."""
        return held_out_of(self._neighbours)

    # in -----------------------------------------------------------------------------------------

    def activation_key(self, step: int, number: int) -> FrameKey:
        """The key of the frame with which a microbatch comes from the stage before."""
        before, layer = self._beside(number, after=False), self._stage.first_layer
        return FrameKey(step, FrameKind.ACTIVATION, layer, number, before.peer_id)

    def gradient_key(self, step: int, number: int) -> FrameKey:
        """The key of the frame with which a microbatch's gradient comes back from the stage
        after."""
        after, kind = self._beside(number, after=True), FrameKind.ACTIVATION_GRADIENT
        return FrameKey(step, kind, self._stage.end_layer, number, after.peer_id)

    async def decoded(self, key: FrameKey, payload: bytearray) -> Tensor:
        """A frame's tensor. Raises `PeerFault`."""
        codec = codec_of(self._mailbox.codec_of(key.kind, key.sender), self._spec.codecs)
        shape = self._spec.boundary_shape(key.layer)
        if codec.lossless:
            return codec.decode(payload, shape)
        turn = self._turn(key.step, key.kind, key.layer, key.index)
        return await self._compute.run(codec.decode, payload, shape, turn)

    def require_finite(self, kind: FrameKind, number: int, values: Tensor | None) -> None:
        """Raises `PeerFault` where values that a neighbour has sent are not finite, or too large.
        Compute thread."""
        ahead = kind is FrameKind.ACTIVATION
        layer = self._stage.first_layer if ahead else self._stage.end_layer
        limit = CODEC_TIMES * boundary_limit(self._spec, layer, back=not ahead)
        if values is not None and not is_within(values, limit):
            cause = f"{kind} of microbatch {number} with a value that is not finite, or too large"
            raise PeerFault(cause, self._beside(number, after=not ahead).peer_id)

    # out ----------------------------------------------------------------------------------------

    def outgoing(self, step: int, kind: FrameKind, number: int, tensor: Tensor) -> Outgoing:
        """A tensor as it is sent. Raises `NotFinite`. Compute thread."""
        name = self.codec(kind, number)
        codec = codec_of(name, self._spec.codecs)
        if codec.lossless:  # other codecs encode on the device, to few bytes
            tensor = self._runner.copies.to_host(tensor).wait()
        layer = self._layer_behind(kind, number)
        limit = boundary_limit(self._spec, layer, back=kind is not FrameKind.ACTIVATION)
        if not is_within(tensor, limit):
            raise NotFinite(f"{kind} of microbatch {number} is not finite, or too large")
        return Outgoing(name, codec.encode(tensor, self._turn(step, kind, layer, number)))

    def again(self, step: int, kind: FrameKind, number: int, sent: Outgoing) -> Outgoing:
        """What was sent once, in the codec of the present view. Compute thread."""
        codec, layer = codec_of(sent.codec, self._spec.codecs), self._layer_behind(kind, number)
        turn, shape = self._turn(step, kind, layer, number), self._spec.boundary_shape(layer)
        return self.outgoing(step, kind, number, codec.decode(sent.payload, shape, turn))

    def send(self, step: int, kind: FrameKind, number: int, sent: Outgoing) -> None:
        """Send a tensor to the neighbour behind its boundary."""
        neighbour, layer = self.neighbour(kind, number), self._layer_behind(kind, number)
        shape = self._spec.boundary_shape(layer)
        header = self._frames.header(step, kind, layer, number, shape, sent.codec)
        lane = "forward" if kind is FrameKind.ACTIVATION else "backward"
        self._frames.send_later(neighbour.peer_id, lane, header, sent.payload)

    def codec(self, kind: FrameKind, number: int) -> str:
        """The codec in which a tensor goes to that neighbour."""
        boundaries, neighbour = self._mailbox.wire.boundaries, self.neighbour(kind, number).peer_id
        if kind is FrameKind.ACTIVATION:
            return boundaries[self._me, neighbour].activation
        return boundaries[neighbour, self._me].gradient

    def neighbour(self, kind: FrameKind, number: int) -> Stage:
        """Where this microbatch's boundary tensor of this kind goes."""
        return self._beside(number, after=kind is FrameKind.ACTIVATION)

    def _layer_behind(self, kind: FrameKind, number: int) -> int:
        """The first layer behind the boundary that a tensor crosses on its way out."""
        ahead = kind is FrameKind.ACTIVATION
        return (self.neighbour(kind, number) if ahead else self._stage).first_layer

    def _beside(self, number: int, *, after: bool) -> Stage:
        """The stage that a microbatch comes from, or goes to."""
        return self._neighbours[self._place(number)].beside(after)

    def _place(self, number: int) -> int:
        """Which of this peer's places a microbatch goes through."""
        for place, beside in enumerate(self._neighbours):
            if number in beside.held_out:
                return place
        return self._replay.place(number)

    def _turn(self, step: int, kind: FrameKind, layer: int, number: int) -> Turn:
        return boundary_turn(self._spec, step, layer, number, back=kind is not FrameKind.ACTIVATION)
