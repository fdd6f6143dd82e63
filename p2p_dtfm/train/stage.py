"""One stage of a pipeline: forward and backward of single microbatches through its layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.train.layer_state import LayerState
from p2p_dtfm.train.model import layer_count, token_loss_sum


@dataclass(frozen=True)
class _InFlight:
    """What a microbatch leaves behind between its forward and its backward."""

    entry: Tensor
    """The stage's input; a leaf whose gradient is wanted, unless it is token numbers."""
    targets: Tensor | None
    result: Tensor | None
    """Output activation or loss with its graph; None if it is to be computed again."""


class StageRunner:
    """Contiguous layers of one peer.

    Gradients of the mean loss over the tokens of the *global* batch accumulate in the layers'
    gradient buffers: the sum over all microbatches, wherever they were computed, is the gradient
    of the step. With `recompute` only a microbatch's input is kept, and its forward is run again
    before its backward (Chen et al. 2016, "Training deep nets with sublinear memory cost").
    """

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
        self._in_flight: dict[int, _InFlight] = {}

    @property
    def in_flight(self) -> int:
        """Microbatches between their forward and their backward."""
        return len(self._in_flight)

    def forward(
        self, microbatch: int, entry: Tensor, targets: Tensor | None = None
    ) -> Tensor | float:
        """Run one microbatch forward and keep what its backward needs.

        `entry` is int64 token numbers [sequences, tokens] if the stage has the embedding, else an
        fp32 activation [sequences, tokens, width]. The stage with the head needs `targets`, int64
        [sequences, tokens], and returns the loss summed over tokens in nats; any other returns
        the fp32 activation that the next stage takes.
        """
        assert microbatch not in self._in_flight, f"microbatch {microbatch} is already in flight"
        entry, targets = self._check(entry, targets)
        if not self.has_embedding:
            entry = entry.detach().requires_grad_()
        with torch.set_grad_enabled(not self.recompute):
            result = self._run(entry, targets)
        kept = None if self.recompute else result
        self._in_flight[microbatch] = _InFlight(entry, targets, kept)
        return self._outward(result)

    def backward(self, microbatch: int, output_gradient: Tensor | None = None) -> Tensor | None:
        """Run one microbatch backward and free what its forward kept.

        `output_gradient` comes from the next stage, in the shape of the output; the stage with the
        head takes None. Returns the gradient of the input for the previous stage, or None if the
        stage has the embedding.
        """
        assert microbatch in self._in_flight, f"microbatch {microbatch} is not in flight"
        kept = self._in_flight.pop(microbatch)
        result = kept.result
        if result is None:
            with torch.enable_grad():
                result = self._run(kept.entry, kept.targets)
        if self.has_head:
            assert output_gradient is None, "no stage follows the head"
            output_gradient = torch.full_like(result, 1.0 / self.spec.tokens_per_step)
        assert output_gradient is not None and output_gradient.shape == result.shape
        torch.autograd.backward(result, output_gradient.to(self.device))
        if self.has_embedding:
            return None
        assert kept.entry.grad is not None
        return kept.entry.grad.detach().contiguous()

    @torch.no_grad()
    def evaluate(self, entry: Tensor, targets: Tensor | None = None) -> Tensor | float:
        """Like `forward`, but nothing is kept and no backward follows."""
        entry, targets = self._check(entry, targets)
        return self._outward(self._run(entry, targets))

    def forget(self, microbatch: int) -> None:
        """Take back a forward: no backward will follow."""
        del self._in_flight[microbatch]

    def discard(self) -> None:
        """Forget all microbatches in flight. Accumulated gradients stay."""
        self._in_flight.clear()

    def zero_gradients(self) -> None:
        """Start a step, or start one again."""
        for state in self.layer_states.values():
            state.zero_gradients()

    def _check(self, entry: Tensor, targets: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert (targets is not None) == self.has_head, "targets go to the stage with the head"
        if self.has_embedding:
            assert entry.dtype == torch.int64 and entry.dim() == 2, (entry.dtype, entry.shape)
        else:
            assert entry.dtype == torch.float32 and entry.dim() == 3, (entry.dtype, entry.shape)
            assert entry.shape[2] == self.spec.model.width, entry.shape
        if targets is not None:
            assert targets.shape == entry.shape[:2], (targets.shape, entry.shape)
            targets = targets.to(self.device)
        return entry.to(self.device), targets

    def _run(self, entry: Tensor, targets: Tensor | None) -> Tensor:
        stream = entry
        for state in self.layer_states.values():
            stream = state.module(stream)
        return stream if targets is None else token_loss_sum(stream, targets)

    def _outward(self, result: Tensor) -> Tensor | float:
        return float(result.item()) if self.has_head else result.detach().contiguous()
