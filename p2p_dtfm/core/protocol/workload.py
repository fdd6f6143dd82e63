"""What one step of a run costs in integers: the part of the run spec that planning needs.

A model is a row of layers: layer 0 is the embedding, layers 1..B the transformer blocks, layer
B+1 the final norm and the head. A stage is a contiguous range of them.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.run_spec import CodecSpec, RunSpec

FLOAT_BYTES = 4
KIBI = 1024
CODEC_BYTES_PER_KIBI = {"fp32": 4096, "fp16": 2048, "bf16": 2048, "int8": 1065}
"""Bytes of 1024 values on the wire; int8 is blockwise, with a scale for each block."""
STATE_COPIES = 4
"""Parameters, gradient and two moments."""


class LayerKind(StrEnum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class LayerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bytes and operations of one layer at the run's microbatch shape."""

    parameter_count: int
    state_bytes: int
    """Resident for as long as the layer is held: parameters, gradient, two moments, and what a
    replica keeps to itself."""
    saved_bytes: int
    """Kept for each microbatch in flight between its forward and its backward."""
    forward_flops: int


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The planner's view of a run spec.

    Of the codecs that the run allows the planner counts the one with the fewest bytes: it is the
    one in use wherever a link is what holds up a pipeline.
    """

    block_count: int
    microbatch_count: int
    evaluation_microbatch_count: int
    boundary_bytes: int
    """An activation (or its gradient) of one microbatch between two layers."""
    embedding: LayerCost
    block: LayerCost
    head: LayerCost
    min_members: int
    boundary_bytes_per_kibi: int = 4096
    """1024 values of an activation or its gradient, as they travel."""
    gradient_bytes_per_kibi: int = 4096
    """1024 values of a parameter gradient, as they are reduced."""
    guarded_bytes_per_kibi: int = 4096
    """1024 values of a reduced gradient, as a guardian gets them: never encoded."""
    recompute: str = "included"
    """As the run spec says it; "included" where all stages do it, or nothing is known of it: then
    the layers' costs count, and no backward is taken to be split."""
    inner_steps: int = 0
    """Of each pipeline in a step, where replicas step alone: the pipeline drains behind each, and
    what is reduced sets out behind the last. 0: gradients are reduced as they become final."""
    least_gain_ppm: int = 0
    """By how many millionths a peer must make the swarm faster, not to be left spare."""

    @property
    def boundary_wire_bytes(self) -> int:
        return -(-self.boundary_bytes * self.boundary_bytes_per_kibi // (FLOAT_BYTES * KIBI))

    def gradient_wire_bytes(self, cost: "LayerCost") -> int:
        """A layer's gradient, in one direction, when a replica contributes it."""
        return -(-cost.parameter_count * self.gradient_bytes_per_kibi // KIBI)

    def guarded_bytes(self, cost: "LayerCost") -> int:
        """A layer's reduced gradient on its way to the guardian."""
        return -(-cost.parameter_count * self.guarded_bytes_per_kibi // KIBI)

    @property
    def layer_count(self) -> int:
        return self.block_count + 2

    def kind(self, layer: int) -> LayerKind:
        assert 0 <= layer < self.layer_count, layer
        if layer == 0:
            return LayerKind.EMBEDDING
        return LayerKind.BLOCK if layer <= self.block_count else LayerKind.HEAD

    def cost(self, layer: int) -> LayerCost:
        cost: LayerCost = getattr(self, self.kind(layer).value)
        return cost


def workload_of(spec: RunSpec) -> Workload:
    """Derive the workload from the run spec.

    Operation counts follow Kaplan et al. 2020, table 1: 2 operations for each parameter of a
    matrix and token, plus attention scores and their use, 4 * context * width for each token.
    Saved bytes count what autograd keeps of a block: input, norms, query/key/value, attention
    output, two residuals and the four-fold hidden layer twice (before and after its
    non-linearity), about 17 values for each token and channel; attention weights are not kept
    (fused attention).
    """
    model = spec.model
    tokens = spec.batch.microbatch * model.context
    width, vocabulary = model.width, model.vocabulary
    block_parameters = 12 * width * width + 13 * width
    block_flops = tokens * (24 * width * width + 4 * model.context * width)
    boundary = tokens * width * FLOAT_BYTES
    embedding_parameters = (vocabulary + model.context) * width
    head_parameters = 2 * width + vocabulary * width
    copies = STATE_COPIES + _private_copies(spec)
    return Workload(
        block_count=model.layers,
        microbatch_count=spec.microbatches_per_step,
        evaluation_microbatch_count=spec.evaluation_microbatches,
        boundary_bytes=boundary,
        embedding=_layer_cost(embedding_parameters, boundary, tokens * width, copies),
        block=_layer_cost(block_parameters, 17 * boundary, block_flops, copies),
        head=_layer_cost(
            head_parameters,
            2 * boundary + 3 * tokens * vocabulary * FLOAT_BYTES,
            2 * tokens * width * vocabulary,
            copies,
        ),
        min_members=spec.limits.min_members,
        boundary_bytes_per_kibi=max(
            _fewest_bytes(spec.codecs.activations), _fewest_bytes(spec.codecs.gradients)
        ),
        gradient_bytes_per_kibi=reduced_bytes_per_kibi(spec.codecs, spec.codecs.reduction),
        recompute=spec.compute.recompute,
        inner_steps=spec.sync.inner_steps if spec.sync.mode == "local" else 0,
        least_gain_ppm=round(spec.limits.least_gain * 1_000_000),
    )


def reduced_bytes_per_kibi(codecs: CodecSpec, reduction: str) -> int:
    """Of 1024 values in the reduction. `sparse`: one in `one_in` is offered, with a mark of a bit
    if not all of these are kept, and those kept take `bits` each."""
    if reduction != "sparse":
        return CODEC_BYTES_PER_KIBI[reduction]
    sparse = codecs.sparse
    offered = -(-KIBI // sparse.one_in)
    kept = -(-offered * sparse.keep_percent // 100)
    marks = offered if sparse.keep_percent < 100 else 0
    return max(1, -(-(kept * sparse.bits + marks) // 8))


def _fewest_bytes(codecs: Iterable[str]) -> int:
    return min(CODEC_BYTES_PER_KIBI[codec] for codec in codecs)


def _private_copies(spec: RunSpec) -> int:
    """Of each parameter: local steps need their own parameters, and their moments as of the last
    commit and as of now; a lossy reduction needs what is owed, as of the last commit and as of now.
    """
    local = 5 if spec.sync.mode == "local" else 0
    return local + (0 if spec.codecs.reduction == "fp32" else 2)


def _layer_cost(
    parameter_count: int, saved_bytes: int, forward_flops: int, copies: int
) -> LayerCost:
    return LayerCost(
        parameter_count=parameter_count,
        state_bytes=copies * FLOAT_BYTES * parameter_count,
        saved_bytes=saved_bytes,
        forward_flops=forward_flops,
    )
