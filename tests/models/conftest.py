"""A small trained model on the disk, and the real `transformers` to compare with."""

from pathlib import Path

import pytest
import torch

from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.train.model.gpt import layer_count
from p2p_dtfm.train.model.layer_state import LayerState
from tests.train.saved_layers import save_layers


def make_spec(**model: object) -> RunSpec:
    sizes = {"layers": 3, "width": 24, "heads": 3, "context": 16, "vocabulary": 256}
    return parse_run_spec(
        {
            "name": "model",
            "seed": 3,
            "total_steps": 20,
            "model": sizes | model,
            "batch": {"global_batch": 4, "microbatch": 2},
            "optimizer": {"peak_learning_rate": 0.01},
            "evaluation": {"sequences": 4},
        },
        "test",
    )


def random_states(spec: RunSpec) -> list[LayerState]:
    """Every parameter random and large enough to matter, norms and biases too."""
    generator = torch.Generator().manual_seed(11)
    states = [LayerState.genesis(spec, layer) for layer in range(layer_count(spec))]
    for state in states:
        noise = torch.randn(state.parameter_count, generator=generator)
        state.parameters.copy_(noise * 0.3 + 0.1)
    return states


def own_logits(states: list[LayerState], tokens: torch.Tensor) -> torch.Tensor:
    stream = tokens
    with torch.no_grad():
        for state in states:
            stream = state.module(stream)
    return stream


@pytest.fixture
def spec() -> RunSpec:
    torch.set_num_threads(1)
    return make_spec()


@pytest.fixture
def states(spec: RunSpec) -> list[LayerState]:
    return random_states(spec)


@pytest.fixture
def checkpoint(spec: RunSpec, states: list[LayerState], tmp_path: Path) -> Path:
    return save_layers(tmp_path / "checkpoints", spec, 0, 0, states)
