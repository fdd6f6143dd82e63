"""A layer's pass over made-up input: to time it, or to see whether a device has what it needs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import told_beside
from p2p_dtfm.train.model.kinds.registry import loss_sum_of_last


@dataclass(frozen=True)
class TrialShape:
    """The sequences of a trial run, and the tokens in each."""

    sequences: int
    tokens: int


def trial_pass(
    spec: RunSpec, layer: int, module: nn.Module, shape: TrialShape, device: torch.device
) -> Callable[[], Tensor]:
    """The forward of `module`, a layer of a run whose layers are a GPT's, on the device."""
    vocabulary, width = spec.model.vocabulary, spec.model.boundary_width
    count = shape.sequences * shape.tokens
    tokens = (torch.arange(count, device=device) % vocabulary).view(shape.sequences, shape.tokens)
    if layer == 0:
        return lambda: module(tokens)
    scale = torch.linspace(-1.0, 1.0, count * width, device=device)
    stream = scale.view(shape.sequences, shape.tokens, width).requires_grad_()
    told = told_beside(spec, tokens)
    if layer > spec.model.layers:
        return lambda: loss_sum_of_last(spec, module, stream, tokens, told.get("code"))
    return lambda: module(stream, **told)
