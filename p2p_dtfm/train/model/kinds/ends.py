"""The two ends of a GPT: its embedding, its head, and the loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.train.model.block import norm_over
from p2p_dtfm.train.model.deferred_gradients import Linear


class Embedding(nn.Module):
    """Token numbers [sequences, tokens] to activations [sequences, tokens, boundary width]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.token = _table(model.vocabulary, model.boundary_width)
        self.position = None
        if model.position == "learned":
            self.position = _table(model.context, model.boundary_width)

    def forward(self, tokens: Tensor, first: int = 0) -> Tensor:
        """The first token of each sequence has position `first`."""
        activation: Tensor = self.token(tokens)
        if self.position is None:
            return activation
        positions = torch.arange(first, first + tokens.shape[1], device=tokens.device)
        activation = activation + self.position(positions)
        return activation


class Head(nn.Module):
    """Activations [sequences, tokens, width] to logits [sequences, tokens, vocabulary]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = norm_over(model, model.width)
        self.logits = Linear(model.width, model.vocabulary, bias=False)

    def forward(self, stream: Tensor) -> Tensor:
        logits: Tensor = self.logits(self.norm(stream))
        return logits


def _table(rows: int, width: int) -> nn.Embedding:
    """An embedding whose rows are not drawn, as genesis follows."""
    table: nn.Embedding = nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)
    return table


def token_loss_sum(logits: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """Sum over all tokens of the negative log-likelihood, in nats.

    logits [sequences, tokens, vocabulary], targets [sequences, tokens]. With `z_loss` the gradient
    is that of a larger sum: `z_loss` times the squared logarithms of the softmax's denominators are
    added (Chowdhery et al. 2022, section 5). This keeps logits from drifting away.
    """
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    if z_loss:
        squares = torch.logsumexp(logits, dim=2).square()
        beside = z_loss * squares[targets >= 0].sum()  # of targets that count
        loss = loss + (beside - beside.detach())
    return loss
