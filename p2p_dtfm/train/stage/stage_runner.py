"""One stage of a pipeline: forward and backward of single microbatches through its layers."""

import contextlib
from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.deferred_gradients import WeightGradients, leave_weight_gradients
from p2p_dtfm.train.model.gpt import Told, layer_count, told_beside
from p2p_dtfm.train.model.kinds.registry import loss_sum_of_last
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.precision import autocast
from p2p_dtfm.train.stage.device.given_gradient import backward_from
from p2p_dtfm.train.stage.host_copies import HostCopies


@dataclass(frozen=True)
class InFlight:
    """What a microbatch leaves behind between its forward and its backward, layer by layer.

    Each layer has a graph of its own, so that a backward can stop between two layers.
    """

    entries: list[Tensor]
    """Each layer's input; a leaf whose gradient is wanted, unless it is token numbers."""
    results: list[Tensor | None]
    """Each layer's output with its graph; of the last layer, its loss. None: computed again."""
    targets: Tensor | None
    tokens: Tensor | None
    """Only in runs whose every stage knows them."""


class StageRunner:
    """Contiguous layers of one peer.

    Gradients of the mean loss over the tokens of the *global* batch accumulate in the layers'
    gradient buffers: the sum over all microbatches, wherever they were computed, is the gradient
    of the step.

    With `recompute` only the layers' inputs are kept, and each layer's forward is run again before
    its backward (Chen et al. 2016, "Training deep nets with sublinear memory cost"). Otherwise a
    stage with another before it can split its backwards (`split_backward`). The sums are the same
    to the last bit however the work is divided.
    """

    repeats_bits = True
    """Whether the same work gives the same bits on any device of the same arithmetic."""

    def __init__(
        self, spec: RunSpec, layer_states: dict[int, LayerState], recompute: bool = False
    ) -> None:
        layers = sorted(layer_states)
        assert layers and layers == list(range(layers[0], layers[-1] + 1)), layers
        self.spec = spec
        self.layer_states = {layer: layer_states[layer] for layer in layers}
        self.recompute = recompute
        self.has_embedding = layers[0] == 0
        self.has_head = layers[-1] == layer_count(spec) - 1
        self.device = layer_states[layers[0]].device
        self.copies = HostCopies(self.device)
        self._in_flight: dict[int, InFlight] = {}
        self._owed: dict[int, dict[int, WeightGradients]] = {}
        self._weights: dict[int, float] = {}
        self._weight_gradients = WeightGradients()
        keeps = self.has_embedding or spec.trains_adapters or bool(spec.layers)
        left_to = None if keeps else self._weight_gradients
        for state in self.layer_states.values():
            leave_weight_gradients(state.module, left_to)

    @property
    def splits(self) -> bool:
        """Whether a backward can leave the gradients of matrices for later."""
        never = self.has_embedding or self.spec.trains_adapters or bool(self.spec.layers)
        return not (never or self.recompute)

    @property
    def in_flight(self) -> int:
        """Microbatches of which anything is kept, from their forward to the end of their
        backward."""
        return len(self._in_flight.keys() | self._owed.keys())

    def forward(
        self,
        microbatch: int,
        entry: Tensor,
        targets: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor | float:
        """Run one microbatch forward and keep what its backward needs.

        `entry` is int64 token numbers [sequences, tokens] if the stage has the embedding, else an
        fp32 activation [sequences, tokens, boundary width]. The stage with the head needs
        `targets`, int64 [sequences, tokens], and returns the loss summed over tokens in nats. Any
        other stage returns the fp32 activation that the next stage takes. `tokens`, int64
        [sequences, tokens], are given to a stage without the embedding, in runs whose every stage
        knows them.
        """
        assert microbatch not in self._in_flight, f"microbatch {microbatch} is already in flight"
        stream, targets = self._check(entry, targets)
        known = self._known(entry if self.has_embedding else tokens)
        with self._kernels():
            return self._forward(microbatch, stream, targets, known)

    def _forward(
        self,
        microbatch: int,
        stream: Tensor,
        targets: Tensor | None,
        tokens: Tensor | None,
    ) -> Tensor | float:
        """The forward of tensors that have been checked and are on the device."""
        kept = InFlight([], [], targets, tokens)
        result = self._through(stream, kept)
        self._in_flight[microbatch] = kept
        return self._outward(result)

    def _through(self, stream: Tensor, kept: InFlight) -> Tensor:
        """The output of the last layer; what backwards need goes into `kept`."""
        told = told_beside(self.spec, kept.tokens)
        for layer in self.layer_states:
            if stream.is_floating_point():
                stream = stream.detach().requires_grad_()
            kept.entries.append(stream)
            with torch.set_grad_enabled(not self.recompute):
                stream = self._run(layer, stream, kept.targets, told)
            kept.results.append(None if self.recompute else stream)
        return stream

    def weigh(self, microbatch: int, weight: float) -> None:
        """Set a microbatch's weight in the backward, for the stage with the head; 1 unless set."""
        if weight != 1.0:
            self._weights[microbatch] = weight

    def backward(self, microbatch: int, output_gradient: Tensor | None = None) -> Tensor | None:
        """Run one microbatch backward and free what its forward kept.

        `output_gradient` comes from the next stage, in the shape of the output; the stage with the
        head takes None. Returns the gradient of the input for the previous stage, or None if the
        stage has the embedding.
        """
        gradient = output_gradient
        for layer in reversed(self.layer_states):
            gradient = self.backward_layer(microbatch, layer, gradient)
        return gradient

    def input_backward(self, microbatch: int, output_gradient: Tensor | None = None) -> Tensor:
        """The part of `backward` for which the previous stage waits. `weight_backward` is left."""
        assert self.splits
        gradient = output_gradient
        for layer in reversed(self.layer_states):
            with self._kernels():
                gradient = self._layer_backward(microbatch, layer, gradient)
            self._owed.setdefault(microbatch, {})[layer] = self._weight_gradients.take()
        assert gradient is not None
        return gradient

    def owes(self, microbatch: int) -> bool:
        """Whether any part of `weight_backward` is left."""
        return microbatch in self._owed

    def weight_backward(self, microbatch: int) -> None:
        """The other part of `backward`. Microbatches must come in the same order in every run."""
        for layer in reversed(self.layer_states):
            self.weight_backward_layer(microbatch, layer)

    def weight_backward_layer(self, microbatch: int, layer: int) -> None:
        """The same for one layer, unless it is done. Layers may come in any order."""
        owed = self._owed.get(microbatch, {})
        if layer in owed:
            with self._kernels():
                owed.pop(layer).settle()
            if not owed:
                del self._owed[microbatch]

    def backward_layer(
        self, microbatch: int, layer: int, gradient: Tensor | None = None
    ) -> Tensor | None:
        """The same as `backward` for one layer, from the last to the first.

        Takes the gradient of the layer's output and returns that of its input. When the last
        microbatch is through, the layer's sum of gradients is final.
        """
        with self._kernels():
            gradient = self._layer_backward(microbatch, layer, gradient)
            self._weight_gradients.settle()
        return gradient

    def _layer_backward(
        self, microbatch: int, layer: int, gradient: Tensor | None
    ) -> Tensor | None:
        kept, entry, result = self._next_layer(microbatch, layer)
        if layer == layer_count(self.spec) - 1:
            assert gradient is None, "no stage follows the head"
            gradient = torch.full((), self._slope_of_loss(microbatch), device=self.device)
        assert gradient is not None
        return self._back(layer, kept, entry, result, self.copies.to_device(gradient))

    def _slope_of_loss(self, microbatch: int) -> float:
        """The factor by which the microbatch's loss enters the step's; works only once."""
        return self._weights.pop(microbatch, 1.0) / self.spec.tokens_per_step

    def _next_layer(self, microbatch: int, layer: int) -> tuple[InFlight, Tensor, Tensor | None]:
        """Take the last layer whose backward is due: what is kept, its input and its output."""
        assert microbatch in self._in_flight, f"microbatch {microbatch} is not in flight"
        kept = self._in_flight[microbatch]
        entry, result = kept.entries.pop(), kept.results.pop()
        assert layer == min(self.layer_states) + len(kept.entries), "layers go last to first"
        if not kept.entries:
            del self._in_flight[microbatch]
        return kept, entry, result

    def _back(
        self,
        layer: int,
        kept: InFlight,
        entry: Tensor,
        result: Tensor | None,
        gradient: Tensor,
    ) -> Tensor | None:
        """A layer's backward: takes the gradient of its output, gives that of its input."""
        if result is None:
            with torch.enable_grad():
                told = told_beside(self.spec, kept.tokens)
                result = self._run(layer, entry, kept.targets, told)
        assert gradient.shape == result.shape
        if result.requires_grad:  # no one asks for a frozen embedding's gradient
            backward_from(result, gradient)
        if not entry.is_floating_point():
            return None
        assert entry.grad is not None
        return entry.grad.detach().contiguous()

    @torch.no_grad()
    def evaluate(
        self, entry: Tensor, targets: Tensor | None = None, tokens: Tensor | None = None
    ) -> Tensor | float:
        """Like `forward`, but nothing is kept and no backward follows."""
        stream, targets = self._check(entry, targets)
        known = self._known(entry if self.has_embedding else tokens)
        with self._kernels():
            told = told_beside(self.spec, known)
            for layer in self.layer_states:
                stream = self._run(layer, stream, targets, told)
        return self._outward(stream)

    def forget(self, microbatch: int) -> None:
        """Take back a forward: no backward will follow."""
        del self._in_flight[microbatch]
        self._weights.pop(microbatch, None)

    def discard(self) -> None:
        """Forget all microbatches in flight. Accumulated gradients stay."""
        self._in_flight.clear()
        self._weights.clear()
        self._owed.clear()
        self._weight_gradients.take()

    def beside_passes(self) -> contextlib.AbstractContextManager[None]:
        """Around what the device computes in a step besides forwards and backwards."""
        return contextlib.nullcontext()

    def _kernels(self) -> contextlib.AbstractContextManager[None]:
        """Around passes: lets a device choose kernels where it matters which ones it takes."""
        return contextlib.nullcontext()

    def zero_gradients(self) -> None:
        """Start a step, or start one again."""
        for state in self.layer_states.values():
            state.zero_gradients()

    def _check(self, entry: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert (targets is not None) == self.has_head, "targets go to the stage with the head"
        if self.has_embedding:
            assert entry.dtype == torch.int64 and entry.dim() == 2, (entry.dtype, entry.shape)
        else:
            due = self.spec.boundary_shape(min(self.layer_states))
            assert entry.dtype == torch.float32, entry.dtype
            assert entry.dim() == len(due) and entry.shape[2:] == due[2:], (entry.shape, due)
        if targets is not None:
            assert targets.shape[0] == entry.shape[0], (targets.shape, entry.shape)
            targets = self.copies.to_device(targets)
        return self.copies.to_device(entry), targets

    def _known(self, tokens: Tensor | None) -> Tensor | None:
        """The tokens on the device, for a run whose every stage knows them; else None."""
        if not self.spec.stages_know_tokens:
            return None
        assert tokens is not None, "every stage needs the tokens"
        return self.copies.to_device(tokens)

    def _run(self, layer: int, entry: Tensor, targets: Tensor | None, told: Told) -> Tensor:
        """Run one layer; for the head, with the loss."""
        is_block = 0 < layer < layer_count(self.spec) - 1
        module = self.layer_states[layer].module
        with autocast(self.spec, self.device):
            if layer == layer_count(self.spec) - 1:
                assert targets is not None
                return loss_sum_of_last(self.spec, module, entry, targets, told.get("code"))
            result: Tensor = module(entry, **(told if is_block else {})).float()
        return result

    def _outward(self, result: Tensor) -> Tensor | float:
        return float(result.item()) if self.has_head else result.detach().contiguous()
