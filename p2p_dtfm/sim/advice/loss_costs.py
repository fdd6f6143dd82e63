"""What fewer bytes cost in held-out loss, as far as the benchmarks have measured it."""

from typing import NamedTuple

from p2p_dtfm.core.protocol.run_spec import RunSpec


class LossCost(NamedTuple):
    """Against fp32 and one step for all after each batch, at equal tokens."""

    percent: float
    source: str


class MeasuredRow(NamedTuple):
    """A row of `benchmarks.compression`: on `tiny`, 250 steps."""

    replicas: int
    most_inner_steps: int
    """Inner steps between two reductions, at most: more were not measured."""
    one_in: int
    keep_percent: int
    bits: int
    cost: LossCost


EXACT = LossCost(0.0, "the run's own batches, reduced in fp32")
MEASURED = (
    MeasuredRow(
        2, 40, 1, 50, 4,
        LossCost(
            0.92, "tiny, two replicas, 40 inner steps, one seed (docs/benchmarks/compression.md)"
        ),
    ),
)  # fmt: skip


def loss_cost(spec: RunSpec, original: RunSpec, replicas: int) -> LossCost | None:
    """Of a spec that was made from another, with so many pipelines; None: nobody measured it."""
    codecs, sparse = spec.codecs, spec.codecs.sparse
    changes_batches = (
        spec.batch.global_batch != original.batch.global_batch
        or spec.model.context != original.model.context
    )
    if {*codecs.activations, *codecs.gradients} != {"fp32"}:
        return None
    if spec.sync.mode == "every_step":
        is_exact = codecs.reduction == "fp32" and not changes_batches
        return EXACT if is_exact else None
    for row in MEASURED:
        told = sparse.one_in, sparse.keep_percent, sparse.bits
        if (
            codecs.reduction == "sparse"
            and told == (row.one_in, row.keep_percent, row.bits)
            and replicas <= row.replicas
            and spec.sync.inner_steps <= row.most_inner_steps
        ):
            return row.cost
    return None
