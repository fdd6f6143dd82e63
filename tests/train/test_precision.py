"""Products are in bf16, everything else is in fp32; where there is no accelerator, copies are
none."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.model.precision import compute_type
from p2p_dtfm.train.model.reference import ReferenceRun
from p2p_dtfm.train.stage.host_copies import HostCopies, host_room
from p2p_dtfm.train.stage.stage_runner import StageRunner

CPU = torch.device("cpu")


def in_precision(spec: RunSpec, precision: str) -> RunSpec:
    return spec.model_copy(
        update={"compute": spec.compute.model_copy(update={"precision": precision})}
    )


def test_the_device_and_the_run_choose(spec: RunSpec) -> None:
    assert compute_type(spec, CPU) is torch.float32
    assert compute_type(in_precision(spec, "bf16"), CPU) is torch.bfloat16
    assert compute_type(in_precision(spec, "fp32"), torch.device("cuda", 0)) is torch.float32


def gradients(spec: RunSpec, batch: Callable[..., tuple[Tensor, Tensor]], split: bool) -> Tensor:
    """The gradients of one microbatch through two stages."""
    first = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (0, 1)})
    last = StageRunner(spec, {n: LayerState.genesis(spec, n) for n in (2, 3, 4)})
    inputs, targets = batch(0, 0)
    activation = first.forward(0, inputs)
    assert activation.dtype == torch.float32
    assert isinstance(last.forward(0, activation, targets), float)
    if split:
        gradient = last.input_backward(0)
        last.weight_backward(0)
    else:
        gradient = last.backward(0)
    assert gradient.dtype == torch.float32
    first.backward(0, gradient)
    states = [*first.layer_states.values(), *last.layer_states.values()]
    return torch.cat([state.gradient_vector() for state in states])


def test_bf16_gradients_are_close_and_split_backwards_the_same(
    spec: RunSpec, toy_batch: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    exact = gradients(spec, toy_batch, split=False)
    short = in_precision(spec, "bf16")
    found, split = (gradients(short, toy_batch, split) for split in (False, True))
    assert found.dtype == torch.float32 and torch.equal(found, split)
    error = float((found - exact).norm() / exact.norm())
    assert 1e-5 < error < 0.02, "computed in bf16, and near"


def test_a_run_in_bf16_learns_as_in_fp32(
    spec: RunSpec, toy_batch: Callable[..., tuple[Tensor, Tensor]]
) -> None:
    """A stage's own loss is compared with the plain loop's, which computes in fp32."""
    short = in_precision(spec, "bf16")
    expected = next(ReferenceRun(spec, toy_batch).losses(1))
    runner = StageRunner(short, {n: LayerState.genesis(short, n) for n in range(5)})
    loss = sum(runner.forward(n, *toy_batch(0, n)) for n in range(spec.microbatches_per_step))
    assert loss / spec.tokens_per_step == pytest.approx(expected, abs=5e-3)


def test_on_the_host_nothing_is_copied() -> None:
    copies = HostCopies(CPU)
    tensor = torch.ones(3)
    assert copies.to_host(tensor).wait() is tensor and copies.to_device(tensor) is tensor
    assert host_room(5, CPU).shape == (5,)


def test_what_is_on_the_host_leaves_from_there_beside_an_accelerator_too() -> None:
    """A tensor that another view sends in another codec is decoded on the host. An accelerator's
    stream takes no record of it."""
    copies = HostCopies(CPU)
    copies._stream = object()
    tensor = torch.ones(3)
    assert copies.to_host(tensor).wait() is tensor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_copies_of_an_accelerator_come_whole() -> None:
    device = torch.device("cuda", 0)
    copies = HostCopies(device)
    there = copies.to_device(torch.arange(1 << 20, dtype=torch.float32))
    back = copies.to_host(there * 2)
    assert back.on_host.is_pinned()
    assert torch.equal(back.wait(), 2 * torch.arange(1 << 20, dtype=torch.float32))
