"""A stage keeps what it must and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.run_spec import RunSpec
from p2p_dtfm.train.layer_state import LayerState
from p2p_dtfm.train.stage import StageRunner

Batch = Callable[[int, int], tuple[Tensor, Tensor]]


@pytest.fixture
def whole(spec: RunSpec) -> StageRunner:
    return StageRunner(spec, {n: LayerState.genesis(spec, n) for n in range(5)})


def gradient_bits(runner: StageRunner) -> list[bytes]:
    return [s.gradient_vector().numpy().tobytes() for s in runner.layer_states.values()]


def test_gradients_gather_in_the_flat_buffer(
    spec: RunSpec, toy_batch: Batch, whole: StageRunner
) -> None:
    whole.forward(0, *toy_batch(0, 0))
    whole.backward(0)
    for state in whole.layer_states.values():
        views = [p.grad.reshape(-1) for p in state.module.parameters() if p.grad is not None]
        assert views[0].data_ptr() == state.gradient_vector().data_ptr()
        assert torch.equal(torch.cat(views), state.gradient_vector())
        assert state.gradient_vector().abs().sum() > 0


def test_discarded_microbatches_leave_no_trace(
    spec: RunSpec, toy_batch: Batch, whole: StageRunner
) -> None:
    whole.forward(0, *toy_batch(0, 0))
    whole.backward(0)
    before = gradient_bits(whole)
    whole.forward(1, *toy_batch(0, 1))
    assert whole.in_flight == 1
    whole.discard()
    assert whole.in_flight == 0 and gradient_bits(whole) == before
    whole.zero_gradients()
    whole.forward(0, *toy_batch(0, 0))
    whole.backward(0)
    assert gradient_bits(whole) == before, "a repeated step must give the same gradient"


def test_misuse_is_caught(spec: RunSpec, toy_batch: Batch, whole: StageRunner) -> None:
    inputs, targets = toy_batch(0, 0)
    whole.forward(0, inputs, targets)
    with pytest.raises(AssertionError, match="already in flight"):
        whole.forward(0, inputs, targets)
    with pytest.raises(AssertionError, match="not in flight"):
        whole.backward(3)
    with pytest.raises(AssertionError):
        StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (0, 2)})


def test_loss_is_a_sum_over_tokens(spec: RunSpec, toy_batch: Batch, whole: StageRunner) -> None:
    inputs, targets = toy_batch(0, 0)
    both = whole.evaluate(inputs, targets)
    each = sum(whole.evaluate(inputs[n : n + 1], targets[n : n + 1]) for n in range(2))
    assert isinstance(both, float) and both == pytest.approx(each, rel=1e-6)
