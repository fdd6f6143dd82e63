"""Frames of one view, from their arrival until the step engine takes them.

Every frame that a correct peer sends is known from the plan: who sends it, to which step, with
which shape. Whatever else arrives is the sender's fault, and so nothing here can grow without
bound: each due frame is held at most once.
"""

import asyncio
from collections.abc import Container
from typing import NamedTuple

from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT
from p2p_dtfm.core.planner.wire_plan import WirePlan, wire_plan
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import ViewId
from p2p_dtfm.core.recovery.partial_replay import StageReplay
from p2p_dtfm.core.schedule.tied_ends import other_end, tied_chunks, tied_ends
from p2p_dtfm.daemon.step.lane_frames import loss_frames
from p2p_dtfm.daemon.step.neighbours import neighbours_of
from p2p_dtfm.net.streams.frames import FrameHeader, FrameKind

TIED_CODEC = "fp32"
"""The codec of a tied matrix's sums, which the ends of a pipeline give each other."""


class FrameKey(NamedTuple):
    step: int
    kind: FrameKind
    layer: int
    index: int  # type: ignore[assignment]  # a tuple's own method is not wanted here
    sender: str


class Mailbox:
    """The frames that are due here in one view. A mailbox can be made before the peer has the state
    of its layers: other members may take over at once."""

    def __init__(
        self, view: ViewId, plan: Plan, me: str, spec: RunSpec, wire: WirePlan | None = None
    ) -> None:
        self.view = view
        self.wire = wire or wire_plan(spec, plan, None)
        self._me = me
        self._reduction_codec = spec.codecs.reduction
        self._holders = {s.first_layer: s.holders for s in segments_of(plan, me).values()}
        self._tied = (other_end(plan, me), tied_chunks(spec)) if tied_ends(spec) else (None, ())
        self._held: dict[FrameKey, bytearray] = {}
        self._seen: set[FrameKey] = set()
        self._loss_frames = loss_frames(spec, plan)
        self._losses: dict[tuple[int, str], bytes] = {}
        """Digests of losses that frames have told of, by step and sender."""
        self._waiting: dict[FrameKey, asyncio.Future[bytearray]] = {}
        self.awaited: FrameKey | None = None
        """The frame without which the caller of `wait_for_arrival` can do nothing."""
        self._arrived = asyncio.Event()
        self._arrivals: list[FrameKey] = []
        self._step: int | None = None
        self._neighbours = neighbours_of(plan, me, spec)
        self._microbatches = [
            plan.pipelines[pipeline].microbatches for pipeline, _ in plan.places_of(me)
        ]
        self._replay: tuple[int, StageReplay, frozenset[int], frozenset[int]] | None = None
        self._layers = plan.layers_of(me)
        self._boundary_shape = spec.boundary_shape

    def replay(self, step: int, replay: StageReplay) -> None:
        """For `step` only frames that are missing here are due; their microbatches may be others'
        by the plan."""
        numbers, forwards, backwards = replay.microbatches, replay.forwards, replay.backwards
        self._replay = step, replay, frozenset(numbers[forwards:]), frozenset(numbers[backwards:])

    # arrivals ---------------------------------------------------------------------------------

    def put(self, sender: str, header: FrameHeader, payload: bytearray) -> None:
        """Take a frame of this view. Raises `PeerFault` for one that is not due."""
        key = FrameKey(header.step, header.kind, header.layer, header.index, sender)
        self._check(key, header)
        if key in self._seen:
            raise PeerFault(f"{key.kind} {key.index} of step {key.step} twice", key.sender)
        if self._step is not None and header.step < self._step:
            return  # of a step that is over
        if header.losses and self._losses.setdefault((key.step, sender), header.losses) != (
            header.losses
        ):
            raise PeerFault(f"tells of unlike losses in step {key.step}", sender)
        self._seen.add(key)
        future = self._waiting.pop(key, None)
        if future is not None and not future.done():
            future.set_result(payload)
            return
        self._held[key] = payload
        if key.kind in (FrameKind.ACTIVATION, FrameKind.ACTIVATION_GRADIENT):
            self._arrivals.append(key)
            self._arrived.set()

    def check(self, sender: str, header: FrameHeader) -> None:
        """Raises `PeerFault` for what is not due, as far as its header tells."""
        self._check(FrameKey(header.step, header.kind, header.layer, header.index, sender), header)

    def _check(self, key: FrameKey, header: FrameHeader) -> None:
        if header.dtype != "float32":
            raise PeerFault(f"a {header.dtype} tensor where float32 is due", key.sender)
        if self._step is not None and key.step >= self._step + STEPS_AHEAD_LIMIT:
            raise PeerFault(f"a tensor of step {key.step} in step {self._step}", key.sender)
        shape = self._due_shape(key)
        if shape is None:
            raise PeerFault(f"{key.kind} {key.index} of layer {key.layer}: not due", key.sender)
        if header.shape != shape:
            raise PeerFault(f"{key.kind} of shape {header.shape}, due is {shape}", key.sender)
        tied = self._tied_shape(key) is not None
        codec = TIED_CODEC if tied else self.codec_of(key.kind, key.sender)
        if header.codec != codec:
            raise PeerFault(f"{key.kind} in {header.codec[:32]}, due is {codec}", key.sender)
        known = self._loss_frames
        tells = known is not None and known.has(key.sender, key.kind, key.layer, key.index)
        if bool(header.losses) != tells:
            text = "without the losses that are due" if tells else "with losses that are not due"
            raise PeerFault(f"{key.kind} {key.index} {text}", key.sender)
        if self._step is None:
            self._check_early_step(key)

    def _check_early_step(self, key: FrameKey) -> None:
        """The first step is not known here yet. Until it is, one sender's frames may belong to
        `STEPS_AHEAD_LIMIT` steps at most; see `begin_step`."""
        steps = {seen.step for seen in self._seen if seen.sender == key.sender} | {key.step}
        if len(steps) > STEPS_AHEAD_LIMIT:
            raise PeerFault(f"a tensor of step {key.step} before the first one", key.sender)

    def codec_of(self, kind: FrameKind, sender: str) -> str:
        """The codec in which this kind of frame comes here from a peer that may send it."""
        if kind is FrameKind.ACTIVATION:
            return self.wire.boundaries[sender, self._me].activation
        if kind is FrameKind.ACTIVATION_GRADIENT:
            return self.wire.boundaries[self._me, sender].gradient
        return self._reduction_codec

    def _due_shape(self, key: FrameKey) -> tuple[int, ...] | None:
        if key.kind in (FrameKind.ACTIVATION, FrameKind.ACTIVATION_GRADIENT):
            return self._boundary_shape(key.layer) if self._is_due_boundary(key) else None
        if tied := self._tied_shape(key):
            return tied
        chunks = self.wire.chunks.get(key.layer)
        if chunks is None or key.sender not in self._holders.get(key.layer, ()):
            return None
        if not 0 <= key.index < len(chunks.bounds):
            return None
        owner = chunks.owners[key.index]
        start, end = chunks.bounds[key.index]
        is_part = key.kind is FrameKind.GRADIENT_PART and owner == self._me
        is_sum = key.kind is FrameKind.GRADIENT_SUM and owner == key.sender
        return (end - start,) if is_part or is_sum else None

    def _tied_shape(self, key: FrameKey) -> tuple[int, ...] | None:
        """The shape of a part of the other end's sum. No segment of this peer begins with that
        layer."""
        lacked, bounds = self._tied
        is_lacked = key.kind is FrameKind.GRADIENT_SUM and lacked == (key.layer, key.sender)
        if not is_lacked or not 0 <= key.index < len(bounds):
            return None
        start, end = bounds[key.index]
        return (end - start,)

    def _is_due_boundary(self, key: FrameKey) -> bool:
        is_activation = key.kind is FrameKind.ACTIVATION
        if key.layer != (self._layers.start if is_activation else self._layers.stop):
            return False
        for place, beside in enumerate(self._neighbours):
            stage = beside.before if is_activation else beside.after
            if stage is not None and stage.peer_id == key.sender:
                held_out = is_activation and key.index in beside.held_out
                if held_out or self._is_missing(place, key.step, key.index, is_activation):
                    return True
        return False

    def _is_missing(self, place: int, step: int, number: int, is_activation: bool) -> bool:
        """Whether a microbatch goes through this place and is not done here yet."""
        if self._replay is None or step != self._replay[0]:
            return number in self._microbatches[place]
        _, replay, activations, gradients = self._replay
        missing = activations if is_activation else gradients
        return number in missing and replay.place(number) == place

    # taking -----------------------------------------------------------------------------------

    def begin_step(self, step: int) -> dict[str, int]:
        """Forget frames of steps before `step`, and those that came before the first step and are
        of none near it. Returns the senders of frames too far ahead, each with the step."""
        self._step = step
        near = range(step, step + STEPS_AHEAD_LIMIT)
        too_far = {key.sender: key.step for key in self._seen if key.step >= near.stop}
        self._held = {key: payload for key, payload in self._held.items() if key.step in near}
        self._seen = {key for key in self._seen if key.step in near}
        self._losses = {key: told for key, told in self._losses.items() if key[0] in near}
        self._arrivals = [key for key in self._arrivals if key.step in near]
        self._arrived.set()
        return too_far

    async def take(self, key: FrameKey) -> bytearray:
        """Wait for a frame."""
        payload = self._held.pop(key, None)
        if payload is not None:
            self._arrivals = [arrival for arrival in self._arrivals if arrival != key]
            return payload
        assert key not in self._waiting, f"two wait for {key}"
        future: asyncio.Future[bytearray] = asyncio.get_running_loop().create_future()
        self._waiting[key] = future
        try:
            return await future
        finally:
            self._waiting.pop(key, None)

    def take_arrivals(self, step: int, indices: Container[int]) -> list[tuple[FrameKey, bytearray]]:
        """Activations and gradients of these microbatches that have come, in order of arrival."""
        taken, left = [], []
        for key in self._arrivals:
            if key.step == step and key.index in indices:
                taken.append((key, self._held.pop(key)))
            else:
                left.append(key)
        self._arrivals = left
        return taken

    async def wait_for_arrival(self, awaited: FrameKey | None = None) -> None:
        """Wait until anything new has come since the last call. `awaited` is the frame that the
        caller needs."""
        self.awaited = awaited
        try:
            await self._arrived.wait()
        finally:
            self.awaited = None
        self._arrived.clear()

    def losses_told(self, step: int, sender: str) -> bytes:
        """The digest of `sender`'s losses, as it came with a frame; empty if no frame has told of
        them."""
        return self._losses.get((step, sender), b"")

    def lacks(self) -> tuple[FrameKey, ...]:
        """The frames that are waited for and have not come."""
        awaited = {key for key in (self.awaited,) if key is not None and key not in self._seen}
        return tuple(sorted(awaited | self._waiting.keys()))


def segments_of(plan: Plan, me: str) -> dict[int, Segment]:
    """The segments that a peer holds, by their number in the plan."""
    return {n: segment for n, segment in enumerate(plan.segments()) if me in segment.holders}
