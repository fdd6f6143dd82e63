"""State travels as equal bytes, and nothing else is accepted as state."""

import pytest
import safetensors.torch
import torch

from p2p_dtfm.core.protocol.errors import PeerFault, UserError
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerState, state_bytes_limit


def trained(spec: RunSpec, layer: int, steps: int = 3) -> LayerState:
    state = LayerState.genesis(spec, layer)
    for step in range(steps):
        gradient = torch.sin(torch.arange(state.parameter_count, dtype=torch.float32) + step)
        state.apply(gradient, 0.5, 0.01)
    return state


@pytest.mark.parametrize("layer", [0, 1, 4])
def test_bytes_read_back_as_the_same_state(spec: RunSpec, layer: int) -> None:
    state = trained(spec, layer)
    payload = state.to_bytes()
    assert len(payload) <= state_bytes_limit(spec, layer)
    again = LayerState.from_bytes(spec, layer, payload)
    assert (again.version, again.digest(), again.to_bytes()) == (3, state.digest(), payload)
    gradient = torch.cos(torch.arange(state.parameter_count, dtype=torch.float32))
    for one in (state, again):
        one.apply(gradient, 1.0, 0.01)
    assert again.digest() == state.digest(), "it must also train on alike"


def test_any_safetensors_reader_can_read_it(spec: RunSpec) -> None:
    state = trained(spec, 1)
    tensors = safetensors.torch.load(bytes(state.to_bytes()))
    assert len(tensors) == 3 * len(state.shapes)
    for name, parameter in state.module.named_parameters():
        assert torch.equal(tensors[f"parameter.{name}"], parameter)
    moments = [tensors[f"second_moment.{name}"].reshape(-1) for name, _ in state.shapes]
    assert torch.equal(torch.cat(moments), state.second_moments)


def test_snapshot_stays_while_training_goes_on(spec: RunSpec) -> None:
    state = trained(spec, 1)
    snapshot, payload, digest = state.snapshot(), state.to_bytes(), state.digest()
    state.apply(torch.ones(state.parameter_count), 1.0, 0.1)
    assert snapshot.to_bytes() == payload and snapshot.digest() == digest != state.digest()
    assert (snapshot.version, state.version) == (3, 4)


def test_apply_leaves_the_reduced_gradient_alone(spec: RunSpec) -> None:
    state = LayerState.genesis(spec, 1)
    gradient = torch.full((state.parameter_count,), 2.0)
    state.apply(gradient, 0.25, 0.01)
    assert torch.equal(gradient, torch.full_like(gradient, 2.0))
    assert not state.gradient_vector().any()


def test_only_matrices_decay(spec: RunSpec) -> None:
    state = LayerState.genesis(spec, 1)
    before = {name: p.detach().clone() for name, p in state.module.named_parameters()}
    state.apply(torch.zeros(state.parameter_count), 1.0, 0.5)
    for name, parameter in state.module.named_parameters():
        factor = 1 - 0.5 * spec.optimizer.weight_decay if parameter.dim() >= 2 else 1.0
        assert torch.allclose(parameter, before[name] * factor, atol=1e-9), name


def test_foreign_bytes_are_refused(spec: RunSpec) -> None:
    payload = bytes(trained(spec, 1).to_bytes())
    other_run = LayerState.genesis(spec.model_copy(update={"seed": 9}), 1).to_bytes()
    bad = [
        b"",
        payload[:7],
        payload[:-1],
        payload + b"\0",
        payload[: len(payload) // 2],
        payload.replace(b"F32", b"I32", 1),
        payload.replace(b'"version":"3"', b'"version":"x"', 1),
        (1 << 40).to_bytes(8, "little") + payload[8:],
        LayerState.genesis(spec, 2).to_bytes(),
        LayerState.genesis(spec, 0).to_bytes(),
        other_run,
    ]
    for received in bad:
        with pytest.raises(PeerFault):
            LayerState.from_bytes(spec, 1, received)
    with pytest.raises(UserError, match=r"layer-1\.safetensors") as caught:
        LayerState.from_bytes(spec, 1, payload[:-1], path="layer-1.safetensors")
    assert caught.value.fixes


def test_a_state_that_moves_goes_on_alike(spec: RunSpec) -> None:
    stays, moves = (LayerState.genesis(spec, 1) for _ in range(2))
    elsewhere = torch.device("cpu", 0)  # the same device by another name
    for step in range(3):
        for state in (stays, moves):
            state.gradient.fill_(0.25 + step)
            state.apply(state.gradient_vector(), 0.5, 1e-2)
        moves.move(elsewhere if step % 2 else None)
    assert moves.digest() == stays.digest() and moves.version == 3
    first = next(moves.module.parameters())
    assert first.data_ptr() == moves.parameters.data_ptr() and first.grad is not None
    assert first.grad.data_ptr() == moves.gradient_vector().data_ptr()
