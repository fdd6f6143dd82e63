"""A layer whose parameters are frozen, with adapters beside some of its matrices (`[lora]`).

Frozen parameters are buffers: no optimizer, gradient or state knows of them. They are left out
("meta") until `set_base` gives them: a peer that only keeps a state needs no memory for them.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2p_dtfm.core.protocol.model_spec import ModelSpec
from p2p_dtfm.core.protocol.sections.lora_spec import AdaptedMatrix, LoraSpec, adapted_matrices
from p2p_dtfm.train.model.deferred_gradients import Linear


class Adapter(nn.Module):
    """[..., inputs] to [..., outputs], through `rank` channels."""

    def __init__(self, matrix: AdaptedMatrix, lora: LoraSpec) -> None:
        super().__init__()
        self.scale = lora.scale
        self.narrow = nn.Parameter(torch.empty(lora.rank, matrix.inputs))
        self.wide = nn.Parameter(torch.empty(matrix.outputs, lora.rank))

    def forward(self, entry: Tensor) -> Tensor:
        return functional.linear(functional.linear(entry, self.narrow), self.wide) * self.scale

    def product(self) -> Tensor:
        """What the adapter adds to the matrix it lies beside: [outputs, inputs], in float64."""
        return self.scale * (self.wide.double() @ self.narrow.double())


class AdaptedLinear(Linear):
    """A linear layer with adapters for some of its rows, each under its target's name."""

    def __init__(self, plain: nn.Linear, matrices: Iterable[AdaptedMatrix], lora: LoraSpec) -> None:
        bias = plain.bias is not None
        super().__init__(plain.in_features, plain.out_features, bias, plain.weight.device)
        self.matrices = tuple(matrices)
        for matrix in self.matrices:
            setattr(self, matrix.target, Adapter(matrix, lora))

    def adapter(self, matrix: AdaptedMatrix) -> Adapter:
        found = getattr(self, matrix.target)
        assert isinstance(found, Adapter)
        return found

    def forward(self, entry: Tensor) -> Tensor:
        frozen = functional.linear(entry, self.weight, self.bias)
        pieces, row = [], 0
        for matrix in self.matrices:
            end = matrix.first_row + matrix.outputs
            if row < matrix.first_row:
                pieces.append(frozen[..., row : matrix.first_row])
            pieces.append(frozen[..., matrix.first_row : end] + self.adapter(matrix)(entry))
            row = end
        if row < self.out_features:
            pieces.append(frozen[..., row:])
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)


def adapt(module: nn.Module, model: ModelSpec, lora: LoraSpec, is_block: bool) -> None:
    """Freeze a layer, and lay adapters beside the matrices that the run names.

    A layer without adapters gets one element that nothing reads: so it has a state, too.
    """
    matrices = adapted_matrices(model, lora) if is_block else []
    for part in dict.fromkeys(matrix.part for matrix in matrices):
        plain = module.get_submodule(part)
        assert isinstance(plain, nn.Linear)
        of_part = [matrix for matrix in matrices if matrix.part == part]
        module.set_submodule(part, AdaptedLinear(plain, of_part, lora))
    for inner in module.modules():
        if isinstance(inner, Adapter):
            continue
        for name, parameter in list(inner.named_parameters(recurse=False)):
            delattr(inner, name)
            inner.register_buffer(name, parameter.detach())
    if not matrices:
        module.register_parameter("unread", nn.Parameter(torch.empty(1)))


def allocate_trained(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Allocate memory for what is trained; buffers stay as they are."""
    for inner in module.modules():
        for name, parameter in list(inner.named_parameters(recurse=False)):
            setattr(inner, name, nn.Parameter(torch.empty_like(parameter, device=device)))
    return module


def move_trained(module: nn.Module, device: torch.device | str) -> nn.Module:
    """Move what is trained to the device. What is frozen comes there when it is given."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(device)
    return module


def has_base(module: nn.Module) -> bool:
    """Whether the layer can compute: nothing frozen is left out."""
    return not any(frozen.is_meta for frozen in module.buffers())


def set_base(module: nn.Module, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Give all frozen parameters, under the names that they have in the model as it was given."""
    places = dict(module.named_buffers())
    for name, tensor in tensors:
        assert places.pop(name).shape == tensor.shape, name
        where, _, kind = name.rpartition(".")
        module.get_submodule(where).register_buffer(kind, tensor)
    assert not places, f"nothing was given for {', '.join(places)}"


def deviation_of_narrow(columns: int) -> float:
    """Standard deviation of an adapter's first matrix: uniform up to 1 / sqrt(inputs)."""
    return 1.0 / math.sqrt(3.0 * columns)


@torch.no_grad()
def merged_into(plain: nn.Module, adapted: nn.Module) -> nn.Module:
    """Fill `plain`, a layer of the model itself, so that it computes what `adapted` does."""
    frozen = dict(adapted.named_buffers())
    for name, parameter in plain.named_parameters():
        parameter.copy_(frozen[name])
    for part, inner in adapted.named_modules():
        if not isinstance(inner, AdaptedLinear):
            continue
        weight = plain.get_parameter(f"{part}.weight")
        for matrix in inner.matrices:
            rows = weight[matrix.first_row : matrix.first_row + matrix.outputs]
            rows.copy_(rows.double() + inner.adapter(matrix).product().to(rows.device))
    return plain
