"""What one step of a run costs in integers: the part of the run spec that planning needs.

A model is a row of layers: layer 0 is the embedding, layers 1..B the transformer blocks, layer
B+1 the final norm and the head. A stage is a contiguous range of them.
"""

from enum import StrEnum

import msgspec

from p2p_dtfm.core.run_spec import RunSpec

FLOAT_BYTES = 4
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


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The planner's view of a run spec."""

    block_count: int
    microbatch_count: int
    evaluation_microbatch_count: int
    boundary_bytes: int
    """An activation (or its gradient) of one microbatch between two layers."""
    embedding: LayerCost
    block: LayerCost
    head: LayerCost
    min_members: int

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
    )


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
