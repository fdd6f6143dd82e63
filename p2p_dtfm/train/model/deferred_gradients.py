"""A backward in two parts: the input's gradient now, the matrices' gradients when there is time.

The stage before in the pipeline waits for the input's gradient only. So a stage does the other part
when it would otherwise wait itself (zero-bubble: Qi et al. 2023, "Zero bubble pipeline
parallelism"). The gradients of a block's four matrices are nearly half of its backward. The rest
(norms, biases, attention) is done at once.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

_ADDS_TO_WIDER = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 8)
"""Whether PyTorch adds a product of bf16 to fp32 in one operation; it does on CUDA devices."""


class _Product(NamedTuple):
    """`weight.grad += gradient^T entry`, not done yet; both are [tokens, features]."""

    weight: nn.Parameter
    gradient: Tensor
    entry: Tensor

    def add(self) -> None:
        assert self.weight.grad is not None
        add_product(self.weight.grad, self.gradient, self.entry)


def add_product(total: Tensor, gradient: Tensor, entry: Tensor) -> None:
    """`total += gradient^T entry`, where the product may be computed in fewer bits."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), entry)
    elif total.is_cuda and _ADDS_TO_WIDER:  # the product itself is not written to memory
        torch.addmm(total, gradient.t(), entry, out_dtype=total.dtype, out=total)
    else:
        total.add_(gradient.t().mm(entry))


def compute_type_of(entry: Tensor) -> torch.dtype:
    """The type in which the entry's products are computed now: within autocast, autocast's."""
    kind = entry.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else entry.dtype


class WeightGradients:
    """The gradients of matrices that backwards have left to be done, in order."""

    def __init__(self, rounded: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        """`rounded`: some parameters' values in the type of products."""
        self._owed: list[Callable[[], None]] = []
        self._rounded = rounded if rounded is not None else {}

    def rounded(self, parameter: Tensor, kind: torch.dtype) -> Tensor:
        """The parameter in the type of products, if it is kept in it; else the parameter itself."""
        if not self._rounded:  # spares the hash of a tensor, which is computed in Python
            return parameter
        found = self._rounded.get(cast(nn.Parameter, parameter))
        return found if found is not None and found.dtype == kind else parameter

    def owe(self, weight: nn.Parameter, gradient: Tensor, entry: Tensor) -> None:
        """Leave the gradient of a matrix for later."""
        self.owe_work(_Product(weight, gradient, entry).add)

    def owe_work(self, work: Callable[[], None]) -> None:
        """Leave any other work that can wait as long."""
        self._owed.append(work)

    def take(self) -> "WeightGradients":
        """Take what is owed until now, to settle it later; nothing stays here."""
        taken = WeightGradients()
        taken._owed, self._owed = self._owed, []
        return taken

    @property
    def is_empty(self) -> bool:
        return not self._owed

    @torch.no_grad()
    def add(self) -> None:
        """Add everything to the parameters' gradients, and keep it: for recordings."""
        for work in self._owed:
            work()

    @torch.no_grad()
    def settle(self) -> None:
        """Add everything to the parameters' gradients; each part then frees its memory."""
        owed, self._owed = self._owed[::-1], []
        while owed:
            owed.pop()()


class Linear(nn.Linear):
    """`nn.Linear` whose matrix's gradient goes to `weight_gradients`, where there is one."""

    weight_gradients: WeightGradients | None = None

    def reset_parameters(self) -> None:
        """Draws nothing, as it would be overwritten: genesis follows (`gpt.initialise_layer`)."""

    def forward(self, entry: Tensor) -> Tensor:
        if self.weight_gradients is None or not torch.is_grad_enabled():
            return functional.linear(entry, self.weight, self.bias)
        given = (entry, self.weight, self.bias, self.weight_gradients)
        result: Tensor = _SplitLinear.apply(*given)  # type: ignore[no-untyped-call]
        return result


def leave_weight_gradients(module: nn.Module, to: WeightGradients | None) -> None:
    """From the next forward on, the matrices of `module` leave their gradients to `to`."""
    for part in module.modules():
        if isinstance(part, Linear):
            part.weight_gradients = to


class _SplitLinear(torch.autograd.Function):
    """The products are those of autograd's own backward of a linear layer."""

    @staticmethod
    def forward(
        context: Any,
        entry: Tensor,
        weight: nn.Parameter,
        bias: Tensor | None,
        weight_gradients: WeightGradients,
    ) -> Tensor:
        context.compute_type = compute_type_of(entry)
        context.entry_type = entry.dtype
        entry = entry.to(context.compute_type)
        matrix = weight_gradients.rounded(weight, context.compute_type)
        context.save_for_backward(entry, matrix)
        context.weight, context.weight_gradients = weight, weight_gradients
        context.has_bias = bias is not None
        if bias is not None:
            bias = weight_gradients.rounded(bias, context.compute_type)
        return functional.linear(entry, matrix, bias)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        entry, matrix = context.saved_tensors
        gradient = gradients[0].to(context.compute_type).reshape(-1, matrix.shape[0])
        context.weight_gradients.owe(context.weight, gradient, entry.reshape(-1, entry.shape[-1]))
        bias = gradient.sum(0, dtype=context.weight.dtype) if context.has_bias else None
        back = gradient.mm(matrix.to(context.compute_type)).view_as(entry)
        return back.to(context.entry_type), None, bias, None
