"""Learning rate, norm and clipping against their definitions."""

import itertools
import math

import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.optimizer import clip_scale, learning_rate
from p2p_dtfm.train.updates.exact_sums import squared_norm


def test_learning_rate_rises_then_falls(spec: RunSpec) -> None:
    rates = [learning_rate(spec, step) for step in range(spec.total_steps + 5)]
    assert rates[0] == pytest.approx(0.005) and rates[1] == rates[2] == 0.01
    assert rates[11] == pytest.approx(0.005), "half way down the cosine"
    assert all(left >= right for left, right in itertools.pairwise(rates[2:]))
    assert rates[20] == rates[-1] == 0.0


def test_squared_norm_is_exact_and_independent_of_threads() -> None:
    gradient = torch.randn(200_001, generator=torch.Generator().manual_seed(3))
    exact = math.fsum(float(value) ** 2 for value in gradient)
    assert squared_norm(gradient) == pytest.approx(exact, rel=1e-13)
    torch.set_num_threads(2)
    try:
        assert squared_norm(gradient) == squared_norm(gradient.clone())
        two_threads = squared_norm(gradient)
    finally:
        torch.set_num_threads(1)
    assert squared_norm(gradient) == two_threads
    assert squared_norm(torch.empty(0)) == 0.0


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 1024, 1025, 40_000, 65_536, 65_537])
def test_a_small_gradients_norm_is_that_of_the_same_among_zeros(count: int) -> None:
    """A small gradient takes fewer lanes than a large one; they add up in the same order."""
    gradient = torch.randn(count, generator=torch.Generator().manual_seed(count))
    among_zeros = torch.cat([gradient, torch.zeros(200_000)])
    assert squared_norm(gradient) == squared_norm(among_zeros)


def test_clip_scale_is_that_of_torch() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([3.0, 0.0, 4.0, 0.0])
    torch.nn.utils.clip_grad_norm_([parameter], 1.0)
    assert parameter.grad.tolist() == pytest.approx([3 * clip_scale(5.0, 1.0), 0, 0.8, 0])
    assert clip_scale(0.5, 1.0) == 1.0 and clip_scale(0.0, 1.0) == 1.0
