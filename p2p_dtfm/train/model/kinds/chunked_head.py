"""A head and its loss, a chunk of tokens at a time: no logits of all tokens are ever there.

The gradient of a chunk's logits follows from the logits alone (softmax less the target). So the
forward computes both products of the backward as well, and the backward only weighs them. The
results are those of the plain head and `token_loss_sum`; sums are taken in another order.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_dtfm.core.protocol.layers.head_chunks import CHUNK_TOKENS, CHUNK_TOKENS_OF_CARDS
from p2p_dtfm.train.model.deferred_gradients import Linear, add_product, compute_type_of
from p2p_dtfm.train.model.kinds.ends import Head


def chunked_loss_sum(head: Head, stream: Tensor, targets: Tensor, z_loss: float = 0.0) -> Tensor:
    """What `token_loss_sum(head(stream), targets, z_loss)` is, in nats.

    stream [sequences, tokens, width], targets [sequences, tokens]; targets below 0 do not count.
    The matrix's gradient goes where the head's `Linear` would leave it.
    """
    matrix = head.logits
    assert isinstance(matrix, Linear) and matrix.bias is None
    entry = head.norm(stream).flatten(0, 1)
    wanted = _Wanted(
        torch.is_grad_enabled() and entry.requires_grad,
        torch.is_grad_enabled() and matrix.weight.requires_grad,
    )
    given = (entry, matrix.weight, targets.flatten(), z_loss, wanted, matrix)
    loss: Tensor = _ChunkedLoss.apply(*given)
    return loss


class _Wanted(NamedTuple):
    """Which gradients will be asked for."""

    of_entry: bool
    of_matrix: bool


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        entry: Tensor,
        weight: Tensor,
        targets: Tensor,
        z_loss: float,
        wanted: _Wanted,
        matrix: Linear,
    ) -> Tensor:
        computed, left_to = compute_type_of(entry), matrix.weight_gradients
        with torch.autocast(entry.device.type, enabled=False):
            factor = weight if left_to is None else left_to.rounded(weight, computed)
            loss, of_entry, of_matrix = _products(
                entry.to(computed), factor.to(computed), targets, z_loss, wanted
            )
        context.of_entry, context.of_matrix, context.matrix = of_entry, of_matrix, matrix
        context.entry_type = entry.dtype
        return loss

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """Works only once: it uses up what the forward kept."""
        gradient, matrix = gradients[0], context.matrix
        of_entry, of_matrix = context.of_entry, context.of_matrix
        context.of_entry = context.of_matrix = None
        if of_entry is not None:
            of_entry = of_entry.mul_(gradient).to(context.entry_type)
        if of_matrix is not None:
            of_matrix.mul_(gradient)
            if matrix.weight_gradients is not None:
                owed, weight = of_matrix, matrix.weight
                matrix.weight_gradients.owe_work(lambda: _add(weight, owed))
                of_matrix = None
        return of_entry, of_matrix, None, None, None, None


def _add(weight: nn.Parameter, owed: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.add_(owed)


def _products(
    entry: Tensor, weight: Tensor, targets: Tensor, z_loss: float, wanted: _Wanted
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(loss, gradient of the entry [tokens, width], gradient of the matrix [vocabulary, width]),
    all in fp32. Gradients that nobody wants are None."""
    loss = entry.new_zeros((), dtype=torch.float32)
    of_entry = torch.empty_like(entry, dtype=torch.float32) if wanted.of_entry else None
    of_matrix = torch.zeros_like(weight, dtype=torch.float32) if wanted.of_matrix else None
    at_once = CHUNK_TOKENS_OF_CARDS if entry.is_cuda else CHUNK_TOKENS
    for first in range(0, len(entry), at_once):
        chunk = slice(first, first + at_once)
        logits = functional.linear(entry[chunk], weight)
        logarithms = torch.log_softmax(logits, dim=1, dtype=torch.float32)
        denominators = logits[:, :1].float() - logarithms[:, :1]
        counts = targets[chunk] >= 0
        places = targets[chunk].clamp(min=0).unsqueeze(1)
        losses = -logarithms.gather(1, places).squeeze(1)
        loss += torch.where(counts, losses, losses.new_zeros(())).sum()
        if not any(wanted):
            continue
        del logits
        gradient = _of_logits(logarithms, denominators, places, z_loss).to(entry.dtype)
        counted = counts.unsqueeze(1).to(entry.dtype)  # rows of entries are shorter than of logits
        if of_entry is not None:
            of_entry[chunk] = gradient.mm(weight) * counted
        if of_matrix is not None:
            add_product(of_matrix, gradient, entry[chunk] * counted)
    return loss, of_entry, of_matrix


def _of_logits(logarithms: Tensor, denominators: Tensor, places: Tensor, z_loss: float) -> Tensor:
    """Gradient of the logits as if all targets counted, in the memory of the softmax's logarithms.
    It is the softmax less the target. Z-loss weighs the softmax: the squared logarithm's derivative
    is twice the logarithm, times the softmax."""
    softmax = logarithms.exp_()
    if z_loss:
        softmax.mul_(1.0 + 2.0 * z_loss * denominators)
    softmax.scatter_add_(1, places, torch.full_like(places, -1.0, dtype=softmax.dtype))
    return softmax
