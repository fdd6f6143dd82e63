"""The plain loop of `sync = "local"`, to which replicas that step alone must come."""

import copy
import math
from collections.abc import Callable, Sequence

import torch
from torch import nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import token_loss_sum
from p2p_dtfm.train.model.optimizer import inner_learning_rate
from p2p_dtfm.train.model.plain_optimizers import PlainOptimizer
from p2p_dtfm.train.model.reference import Batch, ReferenceRun


class LocalReferenceRun(ReferenceRun):
    """Replicas that step alone, then one outer step together.

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
        self.inner = [PlainOptimizer(spec, replica) for replica in self.replicas]
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
        optimizer: PlainOptimizer,
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
        clipped = {id(parameter) for parameter in optimizer.rest}
        for layer in replica:
            limit = self.spec.optimizer.clip_norm / math.sqrt(len(replica))
            rest = [parameter for parameter in layer.parameters() if id(parameter) in clipped]
            torch.nn.utils.clip_grad_norm_(rest, limit)
        optimizer.step(inner_learning_rate(self.spec, step, inner_step))
        return loss_sum
