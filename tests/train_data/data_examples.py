"""Small texts, and the run specs that go with them."""

import random

from p2p_dtfm.core.protocol.run_spec import (
    BatchSpec,
    EvaluationSpec,
    ModelSpec,
    RunSpec,
)
from p2p_dtfm.core.protocol.sections.optimizer_spec import OptimizerSpec

WORDS = ["peer", "layer", "stage", "gradient", "token", "über", "naïve", "模型", "step", "🙂"]


def make_text(size_bytes: int, seed: int = 0) -> str:
    """Lines of words, deterministic, of about `size_bytes` in UTF-8."""
    chance = random.Random(seed)
    lines, total = [], 0
    while total < size_bytes:
        lines.append(" ".join(chance.choices(WORDS, k=chance.randint(1, 12))))
        total += len(lines[-1].encode()) + 1
    return "\n".join(lines) + "\n"


def make_spec(
    *, context: int = 16, vocabulary: int = 256, global_batch: int = 8, microbatch: int = 4
) -> RunSpec:
    """A run spec for the dataset's sake; only shape, seed and batch matter here."""
    return RunSpec(
        name="data-test",
        seed=11,
        total_steps=100,
        model=ModelSpec(layers=1, width=8, heads=1, context=context, vocabulary=vocabulary),
        batch=BatchSpec(global_batch=global_batch, microbatch=microbatch),
        optimizer=OptimizerSpec(peak_learning_rate=1e-3),
        evaluation=EvaluationSpec(sequences=microbatch * 2),
    )
