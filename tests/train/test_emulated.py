"""An emulated device takes the time that it states, with tensors of the right shapes."""

import math
import time
from functools import partial

import pytest
import torch

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.emulated import EmulatedStageRunner, emulated_device, emulated_flops_per_s
from p2p_dtfm.train.stage.measure import measure_device, select_device


def test_the_rate_is_read_and_nonsense_refused() -> None:
    assert emulated_flops_per_s("emulated:40") == 40 * 10**12
    assert emulated_flops_per_s("Emulated:0.0005") == 500_000_000
    assert emulated_flops_per_s("cpu") is None
    for wrong in ("emulated", "emulated:", "emulated:fast", "emulated:-1", "emulated:nan"):
        with pytest.raises(UserError, match="unknown device"):
            emulated_flops_per_s(wrong)
    assert select_device("emulated:3").type == "cpu"


def test_a_pipeline_of_two_stages_takes_the_stated_time(spec) -> None:  # type: ignore[no-untyped-def]
    flops_per_s = workload_of(spec).block.forward_flops * 50  # 20 ms for a block
    device = measure_device(spec, "cpu", None, 1 << 30, flops_per_s)
    assert (device.kind, device.memory_bytes) == ("emulated", 1 << 30)
    assert device == emulated_device(spec, flops_per_s, 1 << 30)
    assert device.block.forward_ns == 20_000_000 and device.block.backward_ns == 40_000_000
    make = partial(EmulatedStageRunner, device, spec)
    last = spec.model.layers + 1
    first = make({layer: LayerState.genesis(spec, layer) for layer in (0, 1)})
    second = make({layer: LayerState.genesis(spec, layer) for layer in range(2, last + 1)})
    for state in (*first.layer_states.values(), *second.layer_states.values()):
        state.zero_gradients()
    shape = (spec.batch.microbatch, spec.model.context)
    tokens = torch.zeros(shape, dtype=torch.int64)
    due_ns = sum(
        timing.forward_ns + timing.backward_ns
        for timing in (device.embedding, device.head, *[device.block] * spec.model.layers)
    )
    began_ns = time.perf_counter_ns()
    repetitions = 5
    for microbatch in range(repetitions):
        activation = first.forward(microbatch, tokens)
        assert activation.shape == (*shape, spec.model.width)
        loss = second.forward(microbatch, activation, tokens)
        assert loss == pytest.approx(tokens.numel() * math.log(spec.model.vocabulary))
        gradient = second.backward(microbatch)
        assert gradient.shape == activation.shape
        assert first.backward(microbatch, gradient) is None
    elapsed_ns = time.perf_counter_ns() - began_ns
    assert elapsed_ns >= 0.99 * repetitions * due_ns
    assert elapsed_ns < 1.25 * repetitions * due_ns
    assert first.in_flight == second.in_flight == 0
    assert not any(s.gradient_vector().any() for s in second.layer_states.values())
    assert second.evaluate(activation, tokens) == loss


def test_recomputation_costs_the_forward_again(spec) -> None:  # type: ignore[no-untyped-def]
    device = emulated_device(spec, workload_of(spec).block.forward_flops * 50, 1 << 30)
    runner = EmulatedStageRunner(device, spec, {1: LayerState.genesis(spec, 1)}, recompute=True)
    entry = torch.zeros((spec.batch.microbatch, spec.model.context, spec.model.width))
    began_s = time.perf_counter()  # a forward's excess is taken off what follows
    result = runner.forward(0, entry)
    runner.backward(0, torch.zeros_like(result))
    assert time.perf_counter() - began_s >= 0.075
