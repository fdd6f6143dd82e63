"""AdamW, the norm, and whether numbers are finite, in one pass on a processor: `_processor.c`,
compiled when the package is built.

The torch twins make several passes over a chunk in the cache (AdamW a dozen), and call PyTorch for
each.
"""

import logging
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from p2p_dtfm.train.kernels.adam_w import Scalars
from p2p_dtfm.train.kernels.known_answer import fixed_numbers

try:
    from p2p_dtfm.train.kernels import _processor
except ImportError:  # no C compiler when this was installed
    _processor = None  # type: ignore[assignment]

Spans = Sequence[tuple[int, int, bool]]
"""First element and end of each span, and whether it decays."""

LARGEST = torch.finfo(torch.float32).max

_log = logging.getLogger(__name__)


def serves(device: torch.device) -> bool:
    """Whether the device is a processor, and this was compiled so that it gives the right bits."""
    return device.type == "cpu" and _is_trusted()


def takes(*tensors: Tensor) -> bool:
    """Whether `is_within`, `copy` and `add` take these tensors: no other types, and no gaps."""
    return all(
        it.dtype == torch.float32 and it.is_contiguous() and serves(it.device) for it in tensors
    )


@cache
def _is_trusted() -> bool:
    if not hasattr(_processor, "add"):  # none, or one built from an older source
        return False
    if _is_exact():
        return True
    _log.warning("the kernels for processors give other bits than they should, PyTorch serves")
    return False


def step(
    values: Tensor, slopes: Tensor, moments: tuple[Tensor, Tensor], spans: Spans, of: Scalars
) -> None:
    """Change parts of fp32 `values` and `moments` in place."""
    value, slope, first, second = (it.detach().numpy() for it in (values, slopes, *moments))
    lasting = of._replace(decay=1.0)
    for start, end, decays in spans:
        scalars = of if decays else lasting
        _processor.adam_w(value, slope, first, second, start, end, *scalars)


def squared_norm(values: Tensor) -> float:
    """The sum of squares of flat fp32."""
    return _processor.squared_norm(values.detach().contiguous().numpy())


def is_within(values: Tensor, limit: float) -> bool:
    """Whether all values are numbers, and no magnitude is above the limit."""
    return _processor.is_within(values.detach().numpy(), limit)


def copy(values: Tensor, target: Tensor) -> bool:
    """Copy; returns whether all values are finite. Both tensors have one length."""
    return _processor.copy(values.detach().numpy(), target.numpy())


def add(first: Tensor, second: Tensor, total: Tensor) -> bool:
    """Add; returns whether all sums are finite. All have one length; `total` may be one of the
    others."""
    return _processor.add(first.detach().numpy(), second.detach().numpy(), total.numpy())


def _is_exact() -> bool:
    """Whether the compiled code rounds each operation exactly. Fused products, and quotients and
    roots that are not rounded to the nearest, would show in some of the fixed numbers."""
    values, slopes = fixed_numbers(0), fixed_numbers(1)
    first, second = fixed_numbers(2) * 1e-3, fixed_numbers(3).abs()
    of = Scalars(0.9, 0.1, 0.95, 0.05, 4.5, 1e-8, 0.999, 0.003)
    wanted_second = second * of.beta2 + slopes * slopes * of.rest2
    wanted_first = first * of.beta1 + slopes * of.rest1
    divisor = wanted_second.double().sqrt().float() * of.scale2 + of.epsilon
    wanted = values * of.decay - wanted_first / divisor * of.step_size
    step(values, slopes, (first, second), [(0, values.numel(), True)], of)
    found = (values, first, second)
    if not all(map(_same, found, (wanted, wanted_first, wanted_second))):
        return False
    small = fixed_numbers(4)[:3] * 1e-20
    squares = [float(value) ** 2 for value in small]
    total = (squares[0] + squares[2]) + squares[1]
    poisoned = torch.tensor([1.0, float("nan"), float("-inf")])
    finds = [is_within(poisoned[start:], LARGEST) for start in range(3)]
    return squared_norm(small) == total and not any(finds)


def _same(found: Tensor, wanted: Tensor) -> bool:
    return torch.equal(found.nan_to_num(), wanted.nan_to_num())
