"""The plain loop: the same run in one process, with nothing but PyTorch.

What a swarm computes must equal this. It shares the model, the genesis parameters and the learning
rate with the rest of the package, and none of its pipeline, state or reduction code.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_count, token_loss_sum
from p2p_dtfm.train.model.optimizer import inner_learning_rate, learning_rate

Batch = tuple[Tensor, Tensor]
"""Inputs and targets: int64 [sequences, tokens] each."""


class ReferenceRun:
    """A run on one device.

    `batch(step, microbatch)` gives inputs and targets of one microbatch of a step.
    """

    def __init__(
        self,
        spec: RunSpec,
        batch: Callable[[int, int], Batch],
        device: torch.device | str = "cpu",
    ) -> None:
        self.spec = spec
        self.batch = batch
        self.device = torch.device(device)
        self.model = nn.Sequential(*(_genesis_layer(spec, n) for n in range(layer_count(spec))))
        self.model.to(self.device)
        self.optimizer = _adam_w(spec, self.model)

    def losses(self, steps: int) -> Iterator[float]:
        """Train `steps` steps from genesis; the loss of each in mean nats per token."""
        for step in range(steps):
            yield self._step(step)

    def _step(self, step: int) -> float:
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum = 0.0
        for microbatch in range(self.spec.microbatches_per_step):
            loss = self._loss_sum(self.batch(step, microbatch))
            (loss / self.spec.tokens_per_step).backward()
            loss_sum += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.optimizer.clip_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.spec, step)
        self.optimizer.step()
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
        return token_loss_sum(self.model(inputs.to(self.device)), targets.to(self.device))


class LocalReferenceRun(ReferenceRun):
    """The same for `sync = "local"`: replicas that step alone, then one outer step together.

    `shares` are the microbatches of each replica. The loss of a step is that of its inner steps.
    """

    def __init__(
        self,
        spec: RunSpec,
        batch: Callable[[int, int], Batch],
        shares: Sequence[range],
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(spec, batch, device)
        self.shares = shares
        self.replicas = [copy.deepcopy(self.model) for _ in shares]
        self.inner = [_adam_w(spec, replica) for replica in self.replicas]
        momentum = spec.sync.outer_momentum
        self.outer = torch.optim.SGD(
            self.model.parameters(),
            lr=spec.sync.outer_learning_rate,
            momentum=momentum,
            nesterov=momentum > 0,
        )

    def _step(self, step: int) -> float:
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        loss_sum = 0.0
        for share, replica, optimizer in zip(self.shares, self.replicas, self.inner, strict=True):
            replica.load_state_dict(self.model.state_dict())
            for inner_step in range(self.spec.sync.inner_steps):
                loss_sum += self._inner_step(step, inner_step, share, replica, optimizer)
            weight = len(share) / self.spec.microbatches_per_step
            pairs = zip(self.model.parameters(), replica.parameters(), strict=True)
            for shared, own in pairs:
                assert shared.grad is not None
                shared.grad += weight * (shared - own).detach()
        self.outer.step()
        return loss_sum / self.spec.tokens_per_step

    def _inner_step(
        self,
        step: int,
        inner_step: int,
        share: range,
        replica: nn.Sequential,
        optimizer: torch.optim.AdamW,
    ) -> float:
        steps = self.spec.sync.inner_steps
        first, end = (len(share) * n // steps for n in (inner_step, inner_step + 1))
        if first == end:
            return 0.0
        optimizer.zero_grad()
        loss_sum = 0.0
        for microbatch in share[first:end]:
            inputs, targets = self.batch(step, microbatch)
            loss = token_loss_sum(replica(inputs.to(self.device)), targets.to(self.device))
            (loss / (targets.numel() * (end - first))).backward()
            loss_sum += loss.item()
        for layer in replica:
            limit = self.spec.optimizer.clip_norm / math.sqrt(len(replica))
            torch.nn.utils.clip_grad_norm_(layer.parameters(), limit)
        for group in optimizer.param_groups:
            group["lr"] = inner_learning_rate(self.spec, step, inner_step)
        optimizer.step()
        return loss_sum


def _adam_w(spec: RunSpec, model: nn.Module) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    settings = spec.optimizer
    return torch.optim.AdamW(
        [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": settings.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )


def _genesis_layer(spec: RunSpec, layer: int) -> nn.Module:
    module = build_layer(spec, layer)
    initialise_layer(module, spec, layer)
    return module
