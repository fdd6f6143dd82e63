"""A stage's work of a step, computed once more from the parameters that it began with.

Bits depend on the arithmetic (`arithmetic`) and on the number of threads. So a peer of the same
arithmetic is asked for a replay, and is given the number of threads that the work had.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from blake3 import blake3
from torch import Tensor

from p2p_dtfm.core.planner.wire_plan import Chunks
from p2p_dtfm.core.protocol.errors import PeerFault
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.train.codecs import Turn, boundary_turn, codec_of
from p2p_dtfm.train.model.gpt import build_layer
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.device.recorded_runner import runner_once
from p2p_dtfm.train.updates.exact_sums import squared_norm
from p2p_dtfm.train.updates.trimmed_sums import trimmed_sum

ACTIVATION = "activation"
GRADIENT = "gradient"


class NoTensor(Exception):
    """Bytes that a stage is said to have received are no tensor."""


class Replayed(NamedTuple):
    gradients: dict[int, Tensor]
    """Flat fp32 gradients by layer."""
    loss_sum: float
    """0 for a stage without the head."""
    sent: dict[tuple[str, int], bytes]
    """Digests of the frames for the neighbours, by `ACTIVATION` or `GRADIENT` and microbatch."""
    held_out_loss_sum: float = 0.0


class Frame(NamedTuple):
    """A boundary tensor as it lay on the line."""

    codec: str
    payload: bytes


class ReplayedEdge(NamedTuple):
    """What came into the stage for one microbatch, and the codecs of what the stage sends."""

    activation: Frame | None = None
    gradient: Frame | None = None
    activation_out: str = ""
    gradient_out: str = ""

    def decoded(self, spec: RunSpec, frame: Frame | None, turn: Turn) -> Tensor:
        assert frame is not None, "a neighbour has sent it"
        shape = spec.boundary_shape(1)
        codec = codec_of(frame.codec, spec.codecs)
        try:
            values: Tensor = codec.decode(bytearray(frame.payload), shape, turn)
        except PeerFault as fault:
            raise NoTensor(fault.cause) from fault
        return values

    def digest(self, spec: RunSpec, codec: str, values: object, turn: Turn) -> bytes:
        """Digest of the frame that the stage sends."""
        return chunk_digest(codec_of(codec, spec.codecs).encode(cast(Tensor, values), turn))


class SharedLayer:
    """A layer with the parameters of a state and gradients of its own."""

    def __init__(self, spec: RunSpec, state: "LayerState | LentLayer") -> None:
        if isinstance(state, LayerState):
            state.be_in_memory()
        self.module = build_layer(spec, state.layer, "meta")
        self.device, self.layer = state.device, state.layer
        self.version, self.moves, self.parameters = state.version, state.moves, state.parameters
        self.gradient = torch.zeros_like(state.parameters)
        start = 0
        for name, parameter in list(self.module.named_parameters()):
            here = slice(start, start + parameter.numel())
            holder, _, last = name.rpartition(".")
            owner = self.module.get_submodule(holder)
            mine = torch.nn.Parameter(state.parameters[here].view(parameter.shape))
            mine.grad = self.gradient[here].view(parameter.shape)
            setattr(owner, last, mine)
            start = here.stop


class LentLayer:
    """Parameters of a layer that is trained elsewhere: as much of a state as a replay needs."""

    def __init__(self, layer: int, payload: bytes, device: torch.device) -> None:
        self.layer, self.device = layer, device
        self.version = self.moves = 0
        # a copy, aligned as tensors are: kernels may add otherwise elsewhere in memory
        self.parameters = from_bytes(payload).clone().to(device)


class GivenWork(NamedTuple):
    """What a replay needs besides parameters."""

    batch: Callable[[int], tuple[Tensor, Tensor]]
    threads: int
    edge: Callable[[int], ReplayedEdge] = lambda number: ReplayedEdge()
    """What has come into the stage, by microbatch."""
    recompute: bool = True
    """Saves memory and costs a third more time; the bits are the same."""
    weight: Callable[[int], float] = lambda number: 1.0
    """The weight of the loss, by microbatch."""
    step: int = 0


class Replay:
    """Replays the stage with the layers of `states`, which stay as they are. It goes microbatch by
    microbatch, the held-out ones first, so that others see it get on. Runs in the compute
    thread."""

    def __init__(
        self, spec: RunSpec, states: "Mapping[int, LayerState | LentLayer]", given: GivenWork
    ) -> None:
        self._spec, self._given = spec, given
        self._layers = {layer: SharedLayer(spec, state) for layer, state in sorted(states.items())}
        layers = cast(dict[int, LayerState], self._layers)
        self._runner = runner_once(spec, layers, given.recompute)
        self._first, self._end = min(states), max(states) + 1
        self._losses: dict[int, float] = {}
        self._sent: dict[tuple[str, int], bytes] = {}
        self._held_out_loss_sum = 0.0

    def evaluate(self, number: int) -> None:
        """Evaluate one held-out microbatch. Raises `NoTensor`, as `train` does."""
        with self._threads():
            near = self._given.edge(number)
            result = self._runner.evaluate(*self._entry_of(number, near))
            if self._runner.has_head:
                loss = float(cast(float, result)) * self._given.weight(number)
                self._held_out_loss_sum += loss
            else:
                self._send_on(number, near, result)

    def train(self, number: int) -> None:
        runner, spec, given = self._runner, self._spec, self._given
        with self._threads():
            near = given.edge(number)
            result = runner.forward(number, *self._entry_of(number, near))
            gradient = None
            if runner.has_head:
                runner.weigh(number, given.weight(number))
                self._losses[number] = float(cast(float, result)) * given.weight(number)
            else:
                self._send_on(number, near, result)
                turn = boundary_turn(spec, given.step, self._end, number, back=True)
                gradient = near.decoded(spec, near.gradient, turn)
            back = runner.backward(number, gradient)
            if not runner.has_embedding:
                turn = boundary_turn(spec, given.step, self._first, number, back=True)
                self._sent[GRADIENT, number] = near.digest(spec, near.gradient_out, back, turn)

    def replayed(self) -> Replayed:
        gradients = {n: layer.gradient for n, layer in self._layers.items()}
        loss_sum = added_up(self._losses.values())
        return Replayed(gradients, loss_sum, self._sent, self._held_out_loss_sum)

    def _entry_of(
        self, number: int, near: ReplayedEdge
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        runner, spec = self._runner, self._spec
        needs_batch = runner.has_embedding or runner.has_head or spec.stages_know_tokens
        tokens, targets = self._given.batch(number) if needs_batch else (None, None)
        turn = boundary_turn(spec, self._given.step, self._first, number, back=False)
        entry = tokens if runner.has_embedding else near.decoded(spec, near.activation, turn)
        assert entry is not None, "a stage starts from tokens, or from what it was sent"
        return entry, targets if runner.has_head else None, tokens

    def _send_on(self, number: int, near: ReplayedEdge, result: object) -> None:
        spec = self._spec
        turn = boundary_turn(spec, self._given.step, self._end, number, back=False)
        self._sent[ACTIVATION, number] = near.digest(spec, near.activation_out, result, turn)

    @contextmanager
    def _threads(self) -> Iterator[None]:
        """Sets the number of threads for one microbatch only: other jobs come between two."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self._given.threads)
            yield
        finally:
            torch.set_num_threads(before)


class SegmentParts:
    """One holder's gradient of a segment, cut into its chunks. Bytes are a lossless codec's."""

    def __init__(self, gradients: Sequence[Tensor], chunks: Chunks) -> None:
        self._gradients = [gradient.detach().cpu() for gradient in gradients]
        self._chunks = chunks

    def part(self, chunk: int) -> Tensor:
        """A copy of the holder's part of a chunk."""
        return torch.cat(self._pieces(chunk))

    def _pieces(self, chunk: int) -> list[Tensor]:
        start, end = self._chunks.bounds[chunk]
        pieces, at = [], 0
        for gradient in self._gradients:
            length = gradient.numel()
            pieces.append(gradient[max(0, start - at) : max(0, min(length, end - at))])
            at += length
        return pieces

    def payload(self, chunk: int) -> bytes:
        return bytes_of(self.part(chunk))

    def digests(self) -> tuple[bytes, ...]:
        """Digests of all chunks. Copies nothing that is in main memory."""
        return tuple(map(self._digest, range(len(self._chunks.bounds))))

    def _digest(self, chunk: int) -> bytes:
        hasher = blake3()
        for piece in self._pieces(chunk):
            if piece.numel():
                hasher.update(cast(Any, piece.numpy()).data.cast("B"))
        return hasher.digest()


def norms_by_holder(holders: Sequence[str], chunks: Chunks, sums: Tensor) -> tuple[float, ...]:
    """The squared norm of what each holder has summed of a segment. `sums`: the segment, flat."""
    by_owner: dict[str, list[float]] = {holder: [] for holder in holders}
    for (start, end), owner in zip(chunks.bounds, chunks.owners, strict=True):
        by_owner[owner].append(squared_norm(sums[start:end]))
    return tuple(added_up(by_owner[holder]) for holder in holders)


def added(parts: Sequence[Tensor], trimmed: Sequence[int] = ()) -> Tensor:
    """The sum in pipeline order, as a chunk's owner adds it. `trimmed`: as in `SegmentCut`."""
    if trimmed:
        return trimmed_sum(parts, trimmed)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def from_bytes(payload: bytes) -> Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.float32)


def bytes_of(values: Tensor) -> bytes:
    return bytes(cast(Any, values.numpy()).data.cast("B"))


def parameters_digest(parameters: Tensor) -> bytes:
    """Digest of a layer's parameters; it names a blob as `chunk_digest` does."""
    return chunk_digest(parameters.detach().cpu().numpy())


def chunk_digest(payload: Any) -> bytes:
    """Names a blob of these bytes while a step is open. Releases the interpreter's lock. It is
    BLAKE3, six times as fast as the BLAKE2b of what lies on disk: in every step all that a peer
    sends and gets is digested."""
    return blake3(memoryview(payload).cast("B")).digest()
