"""The model agrees with the planner's arithmetic, and genesis is the same everywhere."""

import hashlib

import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.train.model.gpt import build_layer, initialise_layer, layer_count, token_loss_sum
from p2p_dtfm.train.model.layer_state import LayerState

GENESIS_DIGEST = "9a0526c006d9b5406144971f36f740cd"


def genesis_module(spec: RunSpec, layer: int) -> torch.nn.Module:
    module = build_layer(spec, layer)
    initialise_layer(module, spec, layer)
    return module


def test_parameter_counts_are_those_that_planning_uses(spec: RunSpec) -> None:
    workload = workload_of(spec)
    assert workload.layer_count == layer_count(spec)
    for layer in range(layer_count(spec)):
        count = sum(p.numel() for p in build_layer(spec, layer).parameters())
        assert count == workload.cost(layer).parameter_count, layer


def test_genesis_bits_never_change(spec: RunSpec) -> None:
    """If the digest changes, peers of two versions would found two different runs."""
    digests = [LayerState.genesis(spec, layer).digest() for layer in range(layer_count(spec))]
    assert hashlib.blake2b("".join(digests).encode(), digest_size=16).hexdigest() == GENESIS_DIGEST


def test_genesis_depends_on_seed_and_layer_and_not_on_torch(spec: RunSpec) -> None:
    torch.manual_seed(1)
    first = LayerState.genesis(spec, 1).digest()
    torch.manual_seed(2)
    assert LayerState.genesis(spec, 1).digest() == first
    assert LayerState.genesis(spec, 2).digest() != first
    assert LayerState.genesis(spec.model_copy(update={"seed": 8}), 1).digest() != first


def test_genesis_has_the_stated_deviation(spec: RunSpec) -> None:
    wide = spec.model_copy(update={"model": spec.model.model_copy(update={"width": 128})})
    block = dict(genesis_module(wide, 1).named_parameters())
    assert abs(block["attention_input.weight"].std().item() - 0.02) < 3e-4
    scaled = 0.02 / (2 * spec.model.layers) ** 0.5
    assert abs(block["feed_forward_output.weight"].std().item() - scaled) < 3e-4
    assert abs(block["attention_input.weight"].mean().item()) < 3e-4
    assert torch.equal(block["attention_norm.weight"], torch.ones(128))
    assert torch.equal(block["attention_input.bias"], torch.zeros(3 * 128))


def test_no_token_sees_a_later_one(spec: RunSpec) -> None:
    model = torch.nn.Sequential(*(genesis_module(spec, n) for n in range(layer_count(spec))))
    tokens = torch.arange(12).view(1, 12)
    changed = tokens.clone()
    changed[0, 7] = 30
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :7], after[0, :7])
    assert not torch.equal(before[0, 7:], after[0, 7:])


def test_genesis_loss_is_near_that_of_a_uniform_guess(spec: RunSpec) -> None:
    model = torch.nn.Sequential(*(genesis_module(spec, n) for n in range(layer_count(spec))))
    tokens = torch.arange(24).view(2, 12)
    loss = token_loss_sum(model(tokens), tokens).item() / 24
    assert abs(loss - torch.tensor(31.0).log().item()) < 0.1
