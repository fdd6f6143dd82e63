"""A stage keeps what it must and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.stage_runner import StageRunner

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


def two_stages(spec: RunSpec, recompute: bool = False) -> tuple[StageRunner, StageRunner]:
    first = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (0, 1)})
    last = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (2, 3, 4)}, recompute)
    return first, last


def fill(first: StageRunner, last: StageRunner, batch: Batch, microbatches: range) -> None:
    for number in microbatches:
        inputs, targets = batch(0, number)
        last.forward(number, first.forward(number, inputs), targets)


def test_a_split_backward_gives_the_same_bits_in_any_order(spec: RunSpec, toy_batch: Batch) -> None:
    first, whole = two_stages(spec)
    _, split = two_stages(spec)
    _, recomputed = two_stages(spec, recompute=True)
    microbatches = range(3)
    passed_on = []
    for runner in (whole, split, recomputed):
        fill(first, runner, toy_batch, microbatches)
        first.discard()
        back = runner.input_backward if runner is split else runner.backward
        passed_on.append([back(number).clone() for number in microbatches])
    assert split.in_flight == 3, "what is owed is memory in use"
    assert gradient_bits(split) != gradient_bits(whole)
    for layer in reversed(split.layer_states):  # layer by layer, each in the order of microbatches
        for number in microbatches:
            split.weight_backward_layer(number, layer)
    assert split.in_flight == whole.in_flight == 0
    assert gradient_bits(split) == gradient_bits(whole) == gradient_bits(recomputed)
    for same in zip(*passed_on, strict=True):
        assert torch.equal(same[0], same[1]) and torch.equal(same[0], same[2])


def test_a_split_backward_is_autograds_own(spec: RunSpec, toy_batch: Batch) -> None:
    first, last = two_stages(spec)
    modules = [state.module for state in last.layer_states.values()]
    fill(first, last, toy_batch, range(1))
    last.input_backward(0)
    last.weight_backward(0)
    found = [p.grad.clone() for module in modules for p in module.parameters()]
    inputs, targets = toy_batch(0, 0)
    stream = first.evaluate(inputs)
    last.zero_gradients()
    StageRunner(
        spec,
        {0: LayerState.genesis(spec, 0)} | last.layer_states | {1: LayerState.genesis(spec, 1)},
    )  # a runner with the embedding leaves all to autograd
    for module in modules:
        stream = module(stream)
    (
        torch.nn.functional.cross_entropy(stream.flatten(0, 1), targets.flatten(), reduction="sum")
        / spec.tokens_per_step
    ).backward()
    for gradient, parameter in zip(
        found, [p for m in modules for p in m.parameters()], strict=True
    ):
        assert torch.allclose(gradient, parameter.grad, rtol=1e-5, atol=1e-9)


def test_a_layer_is_final_before_those_below_it(spec: RunSpec, toy_batch: Batch) -> None:
    first, last = two_stages(spec)
    _, whole = two_stages(spec)
    fill(first, last, toy_batch, range(1))
    first.discard()
    fill(first, whole, toy_batch, range(1))
    whole.backward(0)
    gradient = None
    for layer in (4, 3, 2):
        gradient = last.backward_layer(0, layer, gradient)
        done = last.layer_states[layer].gradient_vector()
        assert torch.equal(done, whole.layer_states[layer].gradient_vector())
        below = [n for n in last.layer_states if n < layer]
        assert not any(last.layer_states[n].gradient_vector().any() for n in below)
    assert last.in_flight == 0


def test_what_is_owed_can_be_discarded(spec: RunSpec, toy_batch: Batch) -> None:
    first, last = two_stages(spec)
    fill(first, last, toy_batch, range(2))
    last.input_backward(0)
    last.discard()
    assert last.in_flight == 0
    last.zero_gradients()
    first.discard()
    fill(first, last, toy_batch, range(1))
    last.backward(0)
    once = gradient_bits(last)
    last.zero_gradients()
    first.discard()
    fill(first, last, toy_batch, range(1))
    last.input_backward(0)
    last.weight_backward(0)
    assert gradient_bits(last) == once
