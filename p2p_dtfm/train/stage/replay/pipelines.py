"""All works of a step, computed once more on one machine: whole pipelines, microbatch by
microbatch, each stage with the threads that its work had.

The frames between two stages are encoded and decoded as they were on the line. So each stage gets
what it got then, to the last bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.sums_in_order import added_up
from p2p_dtfm.train.codecs import boundary_turn, codec_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.device.recorded_runner import runner_once
from p2p_dtfm.train.stage.replay.work import (
    ACTIVATION,
    GRADIENT,
    Replayed,
    SharedLayer,
    chunk_digest,
)


class Holder(NamedTuple):
    """A peer's stage. `threads`: with how many it was computed."""

    layers: range
    threads: int


class Passed(NamedTuple):
    """A microbatch, and the peers whose stages it goes through, in order. `codecs`: for each two
    neighbours, those of the activation and of its gradient."""

    number: int
    peers: tuple[str, ...]
    codecs: tuple[tuple[str, str], ...]


class StepBatches(NamedTuple):
    """The microbatches of one step. `batch` gives inputs and targets, int64 [sequences, tokens];
    `weight` gives the weight of a microbatch's loss."""

    step: int
    batch: Callable[[int], tuple[Tensor, Tensor]]
    weight: Callable[[int], float]
    held_out: Sequence[Passed] = ()
    """Held-out microbatches, which are evaluated before."""


def replay_pipelines(
    spec: RunSpec,
    states: Mapping[int, LayerState],
    holders: Mapping[str, Holder],
    passed: Sequence[Passed],
    batches: StepBatches,
) -> dict[str, Replayed]:
    """The replayed work of each peer. `states`: of all layers; they stay as they are. `passed`: in
    an order in which each peer has added up its microbatches. Runs in the compute thread."""
    runners = {
        peer: _Runner(spec, {layer: states[layer] for layer in holder.layers}, holder.threads)
        for peer, holder in holders.items()
    }
    before = torch.get_num_threads()
    try:
        for each in batches.held_out:
            _evaluate(spec, runners, each, batches)
        for each in passed:
            _pass(spec, runners, each, batches)
    finally:
        torch.set_num_threads(before)
    return {peer: runner.replayed() for peer, runner in runners.items()}


class _Runner:
    """One peer's stage, and its results so far."""

    def __init__(self, spec: RunSpec, states: Mapping[int, LayerState], threads: int) -> None:
        self.first_layer, self.end_layer = min(states), max(states) + 1
        self._layers = {n: SharedLayer(spec, state) for n, state in sorted(states.items())}
        layers = cast(dict[int, LayerState], self._layers)
        self._runner = runner_once(spec, layers)
        self._threads = threads
        self._sent: dict[tuple[str, int], bytes] = {}
        self._losses: list[float] = []
        self._held_out_loss_sum = 0.0

    def evaluate(
        self, entry: Tensor, tokens: Tensor, targets: Tensor, weight: float
    ) -> Tensor | None:
        """Like `forward`, for a held-out microbatch."""
        torch.set_num_threads(self._threads)
        has_head = self._runner.has_head
        result = self._runner.evaluate(entry, targets if has_head else None, tokens)
        if not has_head:
            return cast(Tensor, result)
        self._held_out_loss_sum += float(cast(float, result)) * weight
        return None

    def forward(
        self, number: int, entry: Tensor, tokens: Tensor, targets: Tensor, weight: float
    ) -> Tensor | None:
        """The output for the next stage; None for the last stage, which computes the loss."""
        torch.set_num_threads(self._threads)
        has_head = self._runner.has_head
        result = self._runner.forward(number, entry, targets if has_head else None, tokens)
        if not has_head:
            return cast(Tensor, result)
        self._runner.weigh(number, weight)
        self._losses.append(float(cast(float, result)) * weight)
        return None

    def backward(self, number: int, gradient: Tensor | None) -> Tensor | None:
        torch.set_num_threads(self._threads)
        return self._runner.backward(number, gradient)

    def sends(self, kind: str, number: int, payload: Any) -> None:
        self._sent[kind, number] = chunk_digest(payload)

    def replayed(self) -> Replayed:
        gradients = {n: layer.gradient for n, layer in self._layers.items()}
        return Replayed(gradients, added_up(self._losses), self._sent, self._held_out_loss_sum)


def _pass(
    spec: RunSpec, runners: Mapping[str, _Runner], each: Passed, batches: StepBatches
) -> None:
    """Forward through all stages, and back."""

    def forward(runner: _Runner, *given: Any) -> Tensor | None:
        return runner.forward(each.number, *given)

    _there(spec, runners, each, batches, forward)
    gradient: Tensor | None = None
    for peer, (_, codec) in zip(
        reversed(each.peers), (*reversed(each.codecs), ("", "")), strict=True
    ):
        back = runners[peer].backward(each.number, gradient)
        if back is not None:
            place = batches.step, runners[peer].first_layer, each.number
            gradient = _crossed(spec, codec, back, runners[peer], GRADIENT, place)


def _evaluate(
    spec: RunSpec, runners: Mapping[str, _Runner], each: Passed, batches: StepBatches
) -> None:
    """Forward alone."""
    _there(spec, runners, each, batches, _Runner.evaluate)


def _there(
    spec: RunSpec,
    runners: Mapping[str, _Runner],
    each: Passed,
    batches: StepBatches,
    forward: Callable[..., Tensor | None],
) -> None:
    tokens, targets = batches.batch(each.number)
    weight = batches.weight(each.number)
    entry: Tensor = tokens
    for peer, (codec, _) in zip(each.peers, (*each.codecs, ("", "")), strict=True):
        result = forward(runners[peer], entry, tokens, targets, weight)
        if result is not None:
            place = batches.step, runners[peer].end_layer, each.number
            entry = _crossed(spec, codec, result, runners[peer], ACTIVATION, place)


def _crossed(
    spec: RunSpec,
    codec_name: str,
    values: Tensor,
    sender: _Runner,
    kind: str,
    place: tuple[int, int, int],
) -> Tensor:
    """The values as they leave the line's other end. `place`: step, layer behind, microbatch."""
    codec, turn = (
        codec_of(codec_name, spec.codecs),
        boundary_turn(spec, *place, back=kind == GRADIENT),
    )
    payload = codec.encode(values, turn)
    sender.sends(kind, place[-1], payload)
    shape = spec.boundary_shape(1)
    decoded: Tensor = codec.decode(bytearray(payload), shape, turn)
    return decoded
