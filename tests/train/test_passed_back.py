"""A layer's backward from the gradient of its output."""

import pytest
import torch

from p2p_dtfm.train.stage.device.passed_back import pass_back


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_it_gives_what_torch_gives_bit_for_bit(kind: torch.dtype) -> None:
    torch.manual_seed(1)
    layer, found = torch.nn.Linear(16, 16).to(kind), []
    entry, gradient = torch.randn(2, 3, 8, 16).to(kind)
    for back in (torch.autograd.backward, pass_back):
        layer.zero_grad()
        here = entry.clone().requires_grad_()
        back(torch.tanh(layer(here)), gradient)  # type: ignore[operator]
        assert layer.weight.grad is not None and here.grad is not None
        found.append((here.grad, layer.weight.grad.clone()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


def test_a_gradient_of_another_shape_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError):
        pass_back(torch.ones(2, 3, requires_grad=True) * 2, torch.ones(3))
