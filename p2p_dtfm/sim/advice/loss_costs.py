"""What fewer bytes cost in held-out loss, as far as the benchmarks have measured it."""

from math import isclose
from typing import NamedTuple

from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec


class LossCost(NamedTuple):
    """The cost against fp32 and one step for all after each batch, at equal tokens."""

    percent: float
    source: str


class MeasuredRow(NamedTuple):
    """A row of `benchmarks.compression`: on `tiny`, 250 steps."""

    replicas: int
    most_inner_steps: int
    """The most inner steps between two reductions. More were not measured."""
    optimizers: tuple[str, str]
    """The optimizers of the run in step that the row was compared with, and of the row."""
    inner_batch: tuple[float, float]
    """The fewest and the most sequences of a replica's inner step that were measured, as a part of
    a step's in the compared run."""
    rate: float
    """AdamW's peak learning rate, as a part of the compared run's."""
    outer: tuple[float, float]
    """Learning rate and momentum of the outer step."""
    reduction: tuple[str, ...]
    """The reduction in `_told`'s words."""
    cost: LossCost


BOUNDARIES: dict[str, LossCost] = {
    "rotated6": LossCost(
        0.07, "tiny, one codec between two stages, ten seeds (docs/benchmarks/compression.md)"
    ),
    "subspace": LossCost(
        0.36, "tiny, one codec between two stages, ten seeds (docs/benchmarks/compression.md)"
    ),
}
"""The codecs of both directions, in runs that are otherwise in fp32 and in step."""
INNER_BATCHES = (1 / 8, 420 / (4 * 13 * 32))
"""The bounds with Muon: of eight replicas, which lose more, and of two and four."""
MUON_RATE = 0.02
"""The only rate of Muon that was measured."""
EXACT = LossCost(0.0, "the run's own batches, reduced in fp32")
MEASURED = (
    MeasuredRow(
        2, 40, ("adamw", "adamw"), (1 / 8, 1 / 8), 0.5, (1.0, 0.0), ("sparse", "1", "50", "4"),
        LossCost(
            0.92,
            "tiny, two replicas, 40 inner steps at half the learning rate, one seed "
            "(docs/benchmarks/compression.md)",
        ),
    ),
    MeasuredRow(
        2, 26, ("adamw", "muon"), INNER_BATCHES, 1.0, (1.0, 0.3), ("sign",),
        LossCost(-10.1, "tiny, two replicas, 26 inner steps, five seeds (docs/compression.md)"),
    ),
    MeasuredRow(
        4, 13, ("adamw", "muon"), INNER_BATCHES, 1.0, (1.0, 0.5), ("sign",),
        LossCost(-1.2, "tiny, four replicas, 13 inner steps, five seeds (docs/compression.md)"),
    ),
    MeasuredRow(
        2, 26, ("muon", "muon"), INNER_BATCHES, 1.0, (1.0, 0.3), ("sign",),
        LossCost(6.2, "tiny, two replicas, 26 inner steps, five seeds (docs/compression.md)"),
    ),
    MeasuredRow(
        4, 13, ("muon", "muon"), INNER_BATCHES, 1.0, (1.0, 0.5), ("sign",),
        LossCost(16.8, "tiny, four replicas, 13 inner steps, five seeds (docs/compression.md)"),
    ),
)  # fmt: skip


def loss_cost(spec: RunSpec, original: RunSpec, replicas: int) -> LossCost | None:
    """The cost of a spec that was made from `original`, with so many pipelines. None where it was
    not measured."""
    codecs = spec.codecs
    optimizers = original.optimizer.kind, spec.optimizer.kind
    changes_batches = (
        spec.batch.global_batch != original.batch.global_batch
        or spec.model.context != original.model.context
    )
    boundaries = {*codecs.activations, *codecs.gradients}
    if spec.sync.mode == "every_step":
        is_exact = codecs.reduction == "fp32" and not changes_batches
        if not is_exact or optimizers[0] != optimizers[1] or len(boundaries) > 1:
            return None
        [boundary] = boundaries
        return EXACT if boundary == "fp32" else BOUNDARIES.get(boundary)
    if boundaries != {"fp32"}:
        return None
    return next((r.cost for r in MEASURED if _is_like(r, spec, original, replicas)), None)


def _is_like(row: MeasuredRow, spec: RunSpec, original: RunSpec, replicas: int) -> bool:
    """Whether all that the row depends on is within what was measured."""
    sync, own, other = spec.sync, spec.optimizer, original.optimizer
    inner_steps = sync.inner_steps * max(1, replicas)
    inner_batch = spec.batch.global_batch / (inner_steps * original.batch.global_batch)
    least, most = row.inner_batch
    return (
        _told(spec.codecs) == row.reduction
        and (other.kind, own.kind) == row.optimizers
        and (sync.outer_learning_rate, sync.outer_momentum) == row.outer
        and replicas <= row.replicas
        and sync.inner_steps <= row.most_inner_steps
        and original.sync.mode == "every_step"
        and spec.model.context == original.model.context
        and least <= inner_batch <= most
        and isclose(own.peak_learning_rate, row.rate * other.peak_learning_rate)
        and (own.kind != "muon" or own.muon.peak_learning_rate == MUON_RATE)
    )


def _told(codecs: CodecSpec) -> tuple[str, ...]:
    """The codec of the reduction, and what it depends on."""
    if codecs.reduction != "sparse":
        return (codecs.reduction,)
    sparse = codecs.sparse
    return "sparse", str(sparse.one_in), str(sparse.keep_percent), str(sparse.bits)
