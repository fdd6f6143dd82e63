"""Blocks of every choice have the sizes that planning counts, are causal, and compute the same one
by one."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, workload_of
from p2p_dtfm.train.model.block import PastTokens
from p2p_dtfm.train.model.gpt import (
    build_layer,
    initialise_layer,
    layer_count,
    token_loss_sum,
    told_beside,
)
from p2p_dtfm.train.model.precision import autocast

CHOICES: dict[str, dict] = {
    "gpt2": {},
    "llama": {"preset": "llama", "kv_heads": 2},
    "qwen3": {"preset": "qwen3", "kv_heads": 1, "head_width": 12, "attention_bias": True},
    "rms": {"norm": "rms"},
    "turned": {"position": "rope", "feed_forward_width": 20},
    "gated": {"feed_forward": "swiglu", "kv_heads": 2, "feed_forward_bias": False},
    "yarn": {
        "preset": "llama",
        "rope": {"scaling": "yarn", "factor": 4.0, "original_positions": 8},
    },
}


NARROW = {
    "narrow gpt2": {"written_width": 12},
    "narrow llama": {"preset": "llama", "written_width": 12},
}
"""Blocks of these choices are told the tokens; `test_written_width` has more tests of them."""


def spec_of(choice: str, precision: str = "fp32") -> RunSpec:
    sizes = {"layers": 2, "width": 32, "heads": 4, "context": 16, "vocabulary": 31}
    return parse_run_spec(
        {
            "name": "test",
            "total_steps": 20,
            "model": sizes | {**CHOICES, **NARROW}[choice],
            "batch": {"global_batch": 4, "microbatch": 2},
            "optimizer": {"peak_learning_rate": 0.01},
            "evaluation": {"sequences": 4},
            "compute": {"precision": precision},
        },
        "test",
    )


def model_of(spec: RunSpec) -> torch.nn.Sequential:
    layers = []
    for layer in range(layer_count(spec)):
        module = build_layer(spec, layer)
        initialise_layer(module, spec, layer)
        for parameter in module.parameters():
            parameter.data.mul_(5.0)
        layers.append(module)
    return torch.nn.Sequential(*layers)


@pytest.mark.parametrize("choice", [*CHOICES, *NARROW])
def test_sizes_and_operations_are_those_that_planning_uses(choice: str) -> None:
    spec = spec_of(choice)
    work = workload_of(spec)
    for layer in range(layer_count(spec)):
        count = sum(p.numel() for p in build_layer(spec, layer, "meta").parameters())
        assert count == work.cost(layer).parameter_count, layer
    block = model_of(spec)[1]
    stream = torch.randn(spec.boundary_shape(1), requires_grad=True)
    tokens = torch.arange(32).view(2, 16) % 31
    with FlopCounterMode(display=False) as counter:
        block(stream, **told_beside(spec, tokens))
    # every key is counted, though half of them lie in the future; bar what the counter does not
    # know (the processor's fused attention), these are the matrices' products
    seen = counter.get_total_flops()
    attention = 4 * 2 * 16 * 16 * spec.model.query_width
    assert work.block.forward_flops in (seen, seen + attention)
    kept: dict[int, int] = {}
    own = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(stream, **told_beside(spec, tokens))
    assert sum(kept.values()) == pytest.approx(work.block.saved_bytes, rel=0.2), {
        size // (2 * 16 * FLOAT_BYTES) for size in kept.values()
    }


@pytest.mark.parametrize("choice", CHOICES)
def test_no_token_sees_a_later_one_and_order_matters(choice: str) -> None:
    model = model_of(spec_of(choice))
    tokens = (7 * torch.arange(16) % 31).view(1, 16)
    changed, swapped = tokens.clone(), tokens.clone()
    changed[0, 9] = 30
    swapped[0, [2, 3]] = swapped[0, [3, 2]]
    with torch.no_grad():
        before, after, other = model(tokens), model(changed), model(swapped)
    assert torch.equal(before[0, :9], after[0, :9])
    assert not torch.allclose(before[0, 9:], after[0, 9:])
    assert (before[0, 15] - other[0, 15]).abs().max() > 1e-4, "positions count"


@pytest.mark.parametrize("choice", CHOICES)
def test_one_after_another_with_a_memory_is_as_all_at_once(choice: str) -> None:
    spec = spec_of(choice)
    embedding, *blocks, head = model_of(spec)
    tokens = (5 * torch.arange(24) % 31).view(2, 12)
    past = [PastTokens() for _ in blocks]
    seen = []
    with torch.no_grad():
        whole = torch.nn.Sequential(embedding, *blocks, head)(tokens)
        for part in (tokens[:, :7], *tokens[:, 7:].split(1, dim=1)):
            stream = embedding(part, past[0].count)
            for block, memory in zip(blocks, past, strict=True):
                stream = block(stream, memory)
            seen.append(head(stream))
    assert past[0].count == 12
    assert (torch.cat(seen, dim=1) - whole).abs().max() < 1e-5 * whole.abs().max()


@pytest.mark.parametrize("choice", ["llama", "qwen3"])
def test_in_fewer_bits_the_loss_is_nearly_the_same(choice: str) -> None:
    tokens = (5 * torch.arange(32) % 31).view(2, 16)
    losses = []
    for precision in ("fp32", "bf16"):
        spec = spec_of(choice, precision)
        model = model_of(spec)
        with autocast(spec, torch.device("cpu")):
            loss = token_loss_sum(model(tokens).float(), tokens)
        loss.backward()
        assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())
        losses.append(loss.item())
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.02)
