"""A copy of the whole model as it is after some step, to write text with while training goes on."""

from collections.abc import Mapping

import torch
from torch import nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_layer, layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.lora.adapted import set_base
from p2p_dtfm.train.model.narrow.whole_layers import made_whole

TextModel = list[nn.Module]
"""All layers of the model with which text is written, one after another."""


def copied_layer(spec: RunSpec, state: LayerState) -> nn.Module:
    """A copy of a layer's parameters, in main memory; as a layer of a plain GPT, whatever the run's
    is."""
    made = build_layer(spec, state.layer)
    start, flat = 0, state.parameters.detach().to("cpu")
    with torch.no_grad():
        for parameter in made.parameters():
            here = flat[start : start + parameter.numel()]
            parameter.copy_(here.view_as(parameter))
            start += parameter.numel()
    if spec.trains_adapters:
        frozen = ((name, tensor.cpu()) for name, tensor in state.module.named_buffers())
        set_base(made, frozen)  # shares memory, which nobody changes
    return made_whole(spec, state.layer, made.requires_grad_(False))


def copied_model(spec: RunSpec, states: Mapping[int, LayerState]) -> tuple[int, TextModel] | None:
    """The number of steps that the model has had, and a copy of it. None if layers are missing or
    of unlike ages (some are followed from afar), or lack their frozen parameters (some are
    guarded)."""
    layers = [states.get(layer) for layer in range(layer_count(spec))]
    here = [state for state in layers if state is not None]
    versions = {state.version for state in here}
    if len(here) < len(layers) or len(versions) != 1 or not all(state.has_base for state in here):
        return None
    return versions.pop(), [copied_layer(spec, state) for state in here]
