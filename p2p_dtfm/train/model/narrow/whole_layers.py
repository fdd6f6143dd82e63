"""A plain GPT that computes what a GPT with few written channels does: for writing text, and for
export.

The code goes into the rows of the embedding. It stays in the stream, as the matrices that write
into the stream get rows of zeros for its channels.
"""

import torch
from torch import Tensor, nn

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.gpt import build_plain_layer, layer_entries
from p2p_dtfm.train.model.narrow.fixed_code import place_code, token_code


def whole_spec(spec: RunSpec) -> RunSpec:
    """The run spec with blocks that write all channels. Its digest names no run, unless it is
    `spec`."""
    if not spec.model.written_width:
        return spec
    model = spec.model.model_copy(update={"written_width": 0})
    return spec.model_copy(update={"model": model})


@torch.no_grad()
def made_whole(spec: RunSpec, layer: int, module: nn.Module) -> nn.Module:
    """The same layer in `whole_spec`; the layer itself if that is the same run."""
    if not spec.model.written_width:
        return module
    whole = build_plain_layer(whole_spec(spec), layer, next(module.parameters()).device)
    for name, _ in layer_entries(spec, layer):
        place = whole.get_parameter(name)
        place.zero_()
        written = module.get_parameter(name)
        place[tuple(slice(0, size) for size in written.shape)] = written
        code = _code_in(spec, layer, name, len(place))
        if code is not None:
            place[:, spec.model.boundary_width :] = code
    return whole.requires_grad_(False)


def _code_in(spec: RunSpec, layer: int, name: str, rows: int) -> Tensor | None:
    """The code that this parameter of the embedding holds, a row for each token or place."""
    if layer > 0:
        return None
    numbers = torch.arange(rows)
    if name == "token.weight":
        return token_code(spec.model, numbers)
    return place_code(spec.model, numbers)
