"""A layer's backward from the gradient of its output.

`torch.autograd.backward(result, gradient)` compares their shapes with what it has for shapes that
are not known yet, and loads all of sympy for that: half a second of processor and 40 MB in each
process that trains. Of a scalar it loads nothing.
"""

from typing import Any

import torch
from torch import Tensor


class _Scalar(torch.autograd.Function):
    """Whose gradient by `result` is `gradient`."""

    @staticmethod
    def forward(context: Any, result: Tensor, gradient: Tensor) -> Tensor:
        context.gradient = gradient
        return result.new_zeros(())

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor, None]:
        return context.gradient, None


def pass_back(result: Tensor, gradient: Tensor) -> None:
    """As `torch.autograd.backward(result, gradient)`, bit for bit; both have one shape."""
    assert gradient.shape == result.shape
    scalar: Tensor = _Scalar.apply(result, gradient)  # type: ignore[no-untyped-call]
    scalar.backward()
