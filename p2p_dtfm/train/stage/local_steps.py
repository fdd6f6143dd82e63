"""`sync = "local"`: the inner steps of a pipeline between two reductions (DiLoCo, Douillard et al.
2023).

Within one step of the swarm each pipeline takes `inner_steps` steps of its own, each on its part of
the pipeline's microbatches. What is then reduced is not a gradient but the difference between the
shared parameters and the pipeline's own, weighted by the pipeline's tokens; `LayerState.apply`
makes one Nesterov step with the sum. So order of samples, Prepared, roll-forward and followers are
those of any other step.

Every stage steps on its own layers. Each layer's gradient is clipped by itself, so that an inner
step needs no message between stages. Its norm is clipped to `clip_norm` / sqrt(layers). This lets
through what clipping the whole norm would if all layers' norms were alike. What Muon updates is not
clipped: the length of a gradient does not show in Muon's step.

The inner moments are a replica's private memory, as in the paper; the shared state holds the outer
momentum in the place of the first moments, and zeros for the second.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.schedule.inner_steps import even_ranges
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.optimizer import clip_scale, inner_learning_rate
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.updates.layer_update import LayerUpdate, second_moment_count


class InnerMoments(NamedTuple):
    """What the optimizer of inner steps remembers of a layer."""

    moments: Tensor
    """Flat fp32: first moments of all parameters, then second moments of AdamW's parameters."""
    steps_made: int


def inner_microbatches(spec: RunSpec, microbatches: range) -> list[range]:
    """The microbatches of each inner step of a pipeline: in order, as equal as whole numbers allow.

    A pipeline with fewer microbatches than inner steps makes only as many steps as it has.
    """
    first = microbatches.start
    ranges = even_ranges(len(microbatches), spec.sync.inner_steps)
    return [range(first + start, first + end) for start, end in ranges]


class LocalSteps:
    """The inner steps of one stage within one step.

    The modules compute with parameters of their own meanwhile; the shared parameters, which others
    may be fetching, stay as they are. Call `begin`, then for each inner step some backwards and
    `inner_step`, then `finish`. `abandon` may be called at any time.
    """

    def __init__(
        self,
        spec: RunSpec,
        layer_states: dict[int, LayerState],
        memory: PrivateMemory[InnerMoments],
    ) -> None:
        self._spec = spec
        self._states = layer_states
        self._memory = memory
        self._layers: dict[int, _InnerLayer] = {}
        self._step = 0

    def begin(self, step: int) -> None:
        """Start from the shared parameters, with the moments of the last committed step."""
        self._step = step
        self._layers = {
            layer: _InnerLayer(self._spec, state, self._memory.of(layer))
            for layer, state in self._states.items()
        }

    def inner_step(self, inner_step: int, microbatch_count: int) -> None:
        """Step with the gradients that `microbatch_count` microbatches have left. They are zero
        afterwards."""
        if not microbatch_count:
            return
        scale = self._spec.microbatches_per_step / microbatch_count
        rate = inner_learning_rate(self._spec, self._step, inner_step)
        for layer in self._layers.values():
            layer.step(scale, rate)

    def finish(self, microbatch_count: int) -> None:
        """Leave the weighted difference in the gradient buffers, and propose the moments."""
        weight = microbatch_count / self._spec.microbatches_per_step
        proposed = {number: layer.finish(weight) for number, layer in self._layers.items()}
        self._memory.propose(self._step, proposed)
        self.abandon()

    def abandon(self) -> None:
        """Let the modules compute with the shared parameters again."""
        self._layers = {}
        for state in self._states.values():
            state.compute_with(state.parameters)


class _InnerLayer:
    def __init__(self, spec: RunSpec, state: LayerState, held: InnerMoments | None) -> None:
        self._state = state
        self._clip_norm = spec.optimizer.clip_norm / math.sqrt(layer_count(spec))
        self._parameters = state.parameters.clone()
        state.compute_with(self._parameters)
        counts = [
            self._parameters.numel(),
            second_moment_count(spec, state.layer, state.update_shapes),
        ]
        if held is None:
            held = InnerMoments(self._parameters.new_zeros(sum(counts)), 0)
        self._moments = held.moments.clone()
        first, second = self._moments.split(counts)
        shapes, kept = state.update_shapes, (first, second)
        self._update = LayerUpdate(spec, state.layer, shapes, kept, held.steps_made, exact=False)

    @torch.no_grad()
    def step(self, scale: float, learning_rate: float) -> None:
        gradient = self._state.gradient_vector()
        gradient *= scale
        clipped = [gradient[place] for place in self._update.rest]
        norm = math.hypot(*(float(torch.linalg.vector_norm(part)) for part in clipped))
        for part in clipped:
            part *= clip_scale(norm, self._clip_norm)
        self._update.step(self._parameters, gradient, learning_rate)
        gradient.zero_()

    @torch.no_grad()
    def finish(self, weight: float) -> InnerMoments:
        gradient = self._state.gradient_vector()
        torch.sub(self._state.parameters, self._parameters, out=gradient)
        gradient *= weight
        return InnerMoments(self._moments, self._update.steps_made)
