"""Lies in what a liar computes itself, and in what it sends neighbouring stages."""

import math
from typing import Any

import msgspec

from p2p_dtfm.daemon.step import stage_account
from p2p_dtfm.daemon.step.pipeline import stage_boundary
from p2p_dtfm.daemon.step.pipeline.microbatches import Microbatches
from p2p_dtfm.daemon.step.pipeline.stage_boundary import StageBoundary
from p2p_dtfm.daemon.trainer import step_loop
from p2p_dtfm.daemon.trainer.audited import audits
from p2p_dtfm.testbed.lies.gradients import GRADIENT_LIES, flip, train_with
from p2p_dtfm.testbed.lies.lie import Lie, put
from p2p_dtfm.train.model import optimizer

_SENT, _CAME = (1, 3), (0, 2)
"""Places in a claim of the tensors that cross a boundary."""
UPDATED_BY = 1e-3
"""The share by which each parameter grows."""
LARGEST = 3e38
"""Nearly the largest number of fp32."""


def change_gradients(lie: Lie) -> None:
    """Changes gradients within their buffers, so that all that it claims and sends agrees."""
    change = GRADIENT_LIES.get(lie.kind, flip)
    kept: dict[int, Any] = {}

    def changed(microbatches: Any, step: int, layer: int) -> None:
        if lie.is_told(step):
            gradient = microbatches._runner.layer_states[layer].gradient_vector()
            change(gradient, lie, kept.setdefault(layer, gradient.clone().zero_()))
            kept[layer].copy_(gradient)

    put(Microbatches, "train", train_with(changed))


def train_on_other_tokens(lie: Lie) -> None:
    """Reads its share's tokens from the last to the first. In a first stage that changes the
    inputs, in a last stage the token that follows each."""
    begin = Microbatches.__init__

    def init(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        honest, count = self._batch, self._spec.microbatches_per_step

        def batch(step: int, number: int) -> Any:
            inputs, targets = honest(step, number)
            if number < count and lie.is_told(step):
                return inputs.flip(-1), targets.flip(-1)
            return inputs, targets

        self._batch = batch

    put(Microbatches, "__init__", init)


def leave_out_the_last(lie: Lie) -> None:
    """Leaves out its last microbatch: it counts nothing."""
    begin = Microbatches.__init__

    def init(self: Any, *arguments: Any) -> None:
        begin(self, *arguments)
        honest = self._weight_of

        def weight(step: int, number: int) -> float:
            due: float = honest(step, number)
            is_last = number == max(self._replay.microbatches, default=-1)
            return 0.0 if is_last and lie.is_told(step) else due

        self._weight_of = weight

    put(Microbatches, "__init__", init)


def send_other_activations(lie: Lie) -> None:
    """Sends other activations to the next stage, or other gradients to the one before, and claims
    them as well. It does so to microbatches that train, or, if that is the lie, only to held-out
    ones."""
    honest = StageBoundary.outgoing

    def outgoing(self: Any, step: int, kind: Any, number: int, values: Any) -> Any:
        is_held_out = number >= self._spec.microbatches_per_step
        lies = is_held_out == (lie.kind == "held-out-sent") and lie.is_told(step)
        return honest(self, step, kind, number, values * 1.01 if lies else values)

    put(StageBoundary, "outgoing", outgoing)


def send_what_overflows(lie: Lie) -> None:
    """Sends and claims finite numbers of which its neighbours make what is no number."""
    honest = StageBoundary.outgoing

    def outgoing(self: Any, step: int, kind: Any, number: int, values: Any) -> Any:
        lies = number < self._spec.microbatches_per_step and lie.is_told(step)
        return honest(self, step, kind, number, values.clone().fill_(LARGEST) if lies else values)

    put(stage_boundary, "boundary_limit", lambda spec, layer, back: math.inf)
    put(StageBoundary, "outgoing", outgoing)


def claim_other_tensors(lie: Lie) -> None:
    """Claims other tensors than it has sent its neighbours, or than came from them. Or it claims
    what it has sent, but of the wrong microbatches."""
    honest, fields = stage_account.edges_of, _SENT if lie.kind == "edge-out" else _CAME

    def edges_of(plan: Any, me: str, work: Any, due: Any) -> Any:
        edges = honest(plan, me, work, due)
        if not lie.is_told(work.step):
            return edges
        if lie.kind == "swapped":
            return _each_the_next(edges)
        return {
            number: type(edge)(
                *(bytes(len(it)) if place in fields else it for place, it in enumerate(edge))
            )
            for number, edge in edges.items()
        }

    put(audits, "edges_of", edges_of)


def _each_the_next(edges: dict[int, Any]) -> dict[int, Any]:
    """Gives each microbatch the next one's tensors, among those that cross the same boundaries:
    held-out microbatches go one way only."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for number, edge in edges.items():
        alike.setdefault(tuple(map(len, edge)), []).append(number)
    others = {
        number: edges[other]
        for numbers in alike.values()
        for number, other in zip(numbers, numbers[1:] + numbers[:1], strict=True)
    }
    return {number: others[number] for number in edges}


def claim_other_parameters(lie: Lie) -> None:
    """Claims that it began the step with other parameters, where members hold unlike layers and so
    state them."""
    honest = audits.Audits._claim

    async def claim(self: Any, here: Any, local: Any) -> Any:
        said = await honest(self, here, local)
        if not said.share.parameters or not lie.is_told(here.step):
            return said
        others = {layer: it[::-1] for layer, it in said.share.parameters.items()}
        share = msgspec.structs.replace(said.share, parameters=others)
        return msgspec.structs.replace(said, share=share)

    put(audits.Audits, "_claim", claim)


def update_otherwise(lie: Lie) -> None:
    """Changes its own parameters: all that it computes and claims from then on follows from
    that."""
    honest = optimizer.apply_outcome

    def apply_outcome(spec: Any, state: Any, reduced: Any, step: int, norm: float) -> None:
        honest(spec, state, reduced, step, norm)
        if lie.is_told(step):
            state.parameters.mul_(1.0 + UPDATED_BY)

    put(step_loop, "apply_outcome", apply_outcome)


IN_WORK = {
    **dict.fromkeys(GRADIENT_LIES, change_gradients),
    "tokens": train_on_other_tokens,
    "skipped": leave_out_the_last,
    "activation": send_other_activations,
    "overflow": send_what_overflows,
    "edge-out": claim_other_tensors,
    "edge-in": claim_other_tensors,
    "swapped": claim_other_tensors,
    "held-out-sent": send_other_activations,
    "parameters": claim_other_parameters,
    "update": update_otherwise,
}
