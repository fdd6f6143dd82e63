"""The nearest orthogonal matrix, roughly: Newton-Schulz iterations, as Muon makes them.

From a matrix U S V^T they come near U V^T. Starting with a norm of 1, they compute five times
X <- a X + (b X X^T + c (X X^T)^2) X (Jordan et al. 2024, "Muon: an optimizer for hidden layers").
With these coefficients no singular value passes 1.21 on the way, and in the end all that were not
tiny lie between 0.68 and 1.21.
"""

import math

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.workload import MUON_ITERATIONS
from p2p_dtfm.train.updates.exact_sums import squared_norm

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_TINY = 1e-7
_GRID = 2.0**24


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest orthogonal matrix of fp32 [rows, columns], roughly, in fp32. On a CUDA device it
    is computed in bf16. Its last bits depend on the device."""
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix / (torch.linalg.vector_norm(matrix) + _TINY)
    x = x.T if is_tall else x
    if matrix.device.type == "cuda":
        x = x.to(torch.bfloat16)
    for _ in range(MUON_ITERATIONS):
        gram = x @ x.T
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, polynomial, x, beta=a)
    return (x.T if is_tall else x).to(torch.float32)


def exactly_orthogonal(matrix: Tensor) -> Tensor:
    """Like `orthogonal`, to the same last bit on any device, in whatever order its library adds.

    All factors of products are multiples of 2^-24, so products are multiples of 2^-48. Rows and
    columns of the factors have norms of at most 1.21, 1.46 or 2.81. So by Cauchy and Schwarz no sum
    of any part of the products of one element passes 3.5. Such numbers float64 holds. So nothing is
    rounded within a product of matrices, and each operation on elements is rounded by itself.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    norm = math.sqrt(squared_norm(matrix.reshape(-1)))
    x = matrix.double().mul_(1.0 / (norm + _TINY))
    x = _on_grid((x.T if is_tall else x).contiguous())
    for _ in range(MUON_ITERATIONS):
        gram = _on_grid(x @ x.T)
        polynomial = _on_grid((gram @ gram).mul_(c).add_(gram * b))
        x = _on_grid((polynomial @ x).add_(x * a))
    return (x.T if is_tall else x).to(torch.float32)


def _on_grid(values: Tensor) -> Tensor:
    """Rounds in place to the nearest multiple of 2^-24."""
    return values.mul_(_GRID).round_().mul_(1.0 / _GRID)
