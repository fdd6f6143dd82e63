"""The plain loop: the same run in one process, with nothing but PyTorch.

What a swarm computes must equal this. It shares the model, the genesis parameters and the learning
rate with the rest of the package, and none of its pipeline, state or reduction code.
"""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.block import Block
from p2p_dtfm.train.model.gpt import (
    build_layer,
    initialise_layer,
    layer_count,
    told_beside,
)
from p2p_dtfm.train.model.initial_state import given_tensors
from p2p_dtfm.train.model.kinds.ends import Head
from p2p_dtfm.train.model.kinds.registry import loss_sum
from p2p_dtfm.train.model.lora.adapted import set_base
from p2p_dtfm.train.model.narrow.fixed_code import with_code
from p2p_dtfm.train.model.optimizer import learning_rate
from p2p_dtfm.train.model.plain_optimizers import PlainOptimizer

Batch = tuple[Tensor, Tensor]
"""Inputs and targets: int64 [sequences, tokens] each."""


class ReferenceRun:
    """A run on one device.

    `batch(step, microbatch)` gives inputs and targets of one microbatch of a step. `given(layer)`
    gives the file of a layer of given weights. `weight(step, microbatch)` gives the weight of a
    microbatch's loss.
    """

    def __init__(
        self,
        spec: RunSpec,
        batch: Callable[[int, int], Batch],
        device: torch.device | str = "cpu",
        given: Callable[[int], Path] | None = None,
        weight: Callable[[int, int], float] = lambda step, microbatch: 1.0,
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.weight = weight
        self.device = torch.device(device)
        self.model = nn.Sequential(*(_first(spec, n, given) for n in range(layer_count(spec))))
        self.model.to(self.device)
        if spec.model.tied_head and not spec.trains_adapters:
            shared = self.model[0].get_parameter("token.weight")
            self.model[-1].get_submodule("logits").register_parameter("weight", shared)
        self.optimizer = PlainOptimizer(spec, self.model)

    def losses(self, steps: int, threads: int | None = None) -> Iterator[float]:
        """Train `steps` steps from genesis; gives the loss of each in mean nats per token.
        `threads`: how many compute, instead of torch's setting."""
        before = torch.get_num_threads()
        for step in range(steps):
            torch.set_num_threads(threads or before)
            try:
                loss = self._step(step)
            finally:
                torch.set_num_threads(before)
            yield loss

    def _step(self, step: int) -> float:
        self.optimizer.zero_grad()
        loss_sum = 0.0
        for microbatch in range(self.spec.microbatches_per_step):
            loss = self._loss_sum(self.batch(step, microbatch)) * self.weight(step, microbatch)
            (loss / self.spec.tokens_per_step).backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_norm)
        self.optimizer.step(learning_rate(self.spec, step))
        return loss_sum / self.spec.tokens_per_step

    @torch.no_grad()
    def held_out_loss(self, batches: Iterable[Batch]) -> float:
        """Mean nats per token over `batches`, with the present parameters."""
        loss_sum, tokens = 0.0, 0
        for inputs, targets in batches:
            loss_sum += self._loss_sum((inputs, targets)).item()
            tokens += targets.numel()
        return loss_sum / tokens

    def _loss_sum(self, batch: Batch) -> Tensor:
        inputs, targets = batch
        stream = tokens = inputs.to(self.device)
        told = told_beside(self.spec, tokens)
        for module in self.model:
            if isinstance(module, Block):
                stream = module(stream, **told)
            elif isinstance(module, Head):
                stream = module(with_code(stream, told.get("code")))
            else:
                stream = module(stream)
        return loss_sum(self.spec, stream, targets.to(self.device))


def _first(spec: RunSpec, layer: int, given: Callable[[int], Path] | None) -> nn.Module:
    """A layer before the first step."""
    module = build_layer(spec, layer)
    initialise_layer(module, spec, layer)
    if given is None:
        return module
    tensors = given_tensors(spec, layer, given(layer))
    if spec.trains_adapters:
        set_base(module, tensors)
    else:
        module.load_state_dict(dict(tensors))
    return module
