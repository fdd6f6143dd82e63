"""A run small enough to train for a few steps within a test."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def spec() -> RunSpec:
    return parse_run_spec(
        {
            "name": "test",
            "seed": 7,
            "total_steps": 20,
            "model": {"layers": 3, "width": 16, "heads": 2, "context": 12, "vocabulary": 31},
            "batch": {"global_batch": 8, "microbatch": 2},
            "optimizer": {"peak_learning_rate": 0.01, "warmup_steps": 2, "clip_norm": 0.5},
            "evaluation": {"sequences": 4},
        },
        "test",
    )


@pytest.fixture(scope="session")
def toy_batch(spec: RunSpec) -> Callable[[int, int], tuple[Tensor, Tensor]]:
    """Sequences that count upwards with a stride, some tokens replaced: inputs and targets. They
    are a pure function of step and microbatch, with something to learn in them."""
    sequences, context, vocabulary = (
        spec.batch.microbatch,
        spec.model.context,
        spec.model.vocabulary,
    )

    def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * step + microbatch)
        start = torch.randint(vocabulary, (sequences, 1), generator=generator)
        stride = torch.randint(1, 4, (sequences, 1), generator=generator)
        tokens = (start + stride * torch.arange(context + 1)) % vocabulary
        noise = torch.randint(vocabulary, tokens.shape, generator=generator)
        tokens = torch.where(torch.rand(tokens.shape, generator=generator) < 0.1, noise, tokens)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch
