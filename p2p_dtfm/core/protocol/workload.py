"""What one step of a run costs, in integers: the part of the run spec that planning needs.

A model is a row of layers: layer 0 is the embedding, layers 1..B the transformer blocks, layer
B+1 the final norm and the head. A stage is a contiguous range of them.
"""

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.layers.gpt_sizes import (
    block_flops,
    block_matrices,
    block_parameters,
    hidden_inputs,
    norm_parameters,
    read_by_head,
    saved_values,
)
from p2p_dtfm.core.protocol.layers.head_chunks import head_values
from p2p_dtfm.core.protocol.layers.listed import ListedLayer
from p2p_dtfm.core.protocol.run_spec import Codec, CodecSpec, RunSpec
from p2p_dtfm.core.protocol.sections.lora_spec import adapted_matrices

FLOAT_BYTES = 4
KIBI = 1024
CODEC_BYTES_PER_KIBI = {"fp32": 4096, "fp16": 2048, "bf16": 2048, "int8": 1065, "sign": 132}
CODEC_BYTES_PER_KIBI |= {"rotated6": 776, "rotated4": 496, "subspace": 480}
"""Bytes of 1024 values on the wire, with the scales of blocks."""
STATE_COPIES = 4
"""Parameters, gradient and two moments."""
MUON_ITERATIONS = 5
"""Newton-Schulz iterations for each matrix and update."""
_SECOND_MOMENTS = 2
"""Copies of second moments in inner steps: as of the last commit and as of now. Muon keeps none."""
_MILLION = 1_000_000


class LayerRole(StrEnum):
    EMBEDDING = "embedding"
    BLOCK = "block"
    HEAD = "head"


class LayerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Bytes and operations of one layer at the run's microbatch shape."""

    parameter_count: int
    """Parameters that are trained."""
    state_bytes: int
    """Bytes resident for as long as the layer is held: parameters, gradient, two moments, what a
    replica keeps to itself, and frozen parameters."""
    saved_bytes: int
    """Bytes kept for each microbatch in flight between its forward and its backward."""
    forward_flops: int
    update_flops: int = 0
    """Operations of an update, once in a step or in each inner step; 0: too few to be counted."""
    unlike: "UnlikeLayers | None" = None
    """The single layers, where this is the mean of layers that a run lists one by one."""
    shared_bytes: int = 0
    """Bytes of the reduced gradient of a matrix that another layer has too. After the reduction,
    each layer's holder gives it to the other's in its pipeline, if that is another peer."""
    backward_flops: int = 0
    """Operations of a backward where matrices are frozen, so that no part of it can be left for
    later. 0 stands for twice the forward's: half for the input's gradient, half for the matrices'.
    """
    frozen_bytes: int = 0
    """Bytes of frozen parameters, which `state_bytes` includes. A peer that gets the layer fetches
    them once."""


class UnlikeLayers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers that a run lists one by one."""

    costs: tuple[LayerCost, ...]
    """The cost of each distinct layer, in the order in which they first come."""
    order: tuple[int, ...]
    """For each layer, ends included, its index in `costs`."""
    boundary_bytes: tuple[int, ...]
    """Bytes that each layer but the last gives on, for one microbatch."""


class AllowedCodecs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The codecs among which a planner chooses for each boundary; the run prefers the first."""

    activations: tuple[Codec, ...]
    gradients: tuple[Codec, ...]


class Confined(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Which peers a run leaves its layers to, if not to all."""

    one_stage: bool = False
    """Whether each stage has all layers: the head is the token embedding, and what the holders of
    the two ends give each other cannot be audited."""
    ends: tuple[str, ...] = ()
    """Sorted ids of the only peers that may have the first and the last layer; empty: all may."""


class Workload(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The planner's view of a run spec."""

    block_count: int
    microbatch_count: int
    evaluation_microbatch_count: int
    boundary_bytes: int
    """Bytes of an activation (or its gradient) of one microbatch between two layers; the largest
    where layers are unlike."""
    embedding: LayerCost
    block: LayerCost
    head: LayerCost
    min_members: int
    boundary_bytes_per_kibi: int | AllowedCodecs = 4096
    """Bytes of 1024 values of an activation or its gradient on the wire; or the allowed codecs."""
    gradient_bytes_per_kibi: int = 4096
    """Bytes of 1024 values of a parameter gradient as they are reduced."""
    guarded_bytes_per_kibi: int = 4096
    """Bytes of 1024 values of a reduced gradient as a guardian gets them: never encoded."""
    recompute: str = "included"
    """As the run spec says it. "included": all stages recompute, or nothing is known of it. Then
    the layers' costs count as they are, and no backward is taken to be split."""
    inner_steps: int = 0
    """Inner steps of each pipeline in a step, where replicas step alone. The pipeline drains after
    each, and the reduction begins after the last. 0: gradients are reduced as they become final."""
    least_gain_ppm: int = 0
    """By how many millionths a peer must make the swarm faster, or it is left spare."""

    confined: Confined | None = None
    """None where any peer may hold any layers."""

    @property
    def one_stage(self) -> bool:
        return self.confined is not None and self.confined.one_stage

    def may_have(self, peer_id: str, layer: int) -> bool:
        """Whether a peer may get the state of a layer."""
        ends = () if self.confined is None else self.confined.ends
        return not ends or 0 < layer < self.layer_count - 1 or peer_id in ends

    @property
    def block_update_ppm(self) -> int:
        """Time of a block's update, in millionths of its forward of a microbatch."""
        return _MILLION * self.block.update_flops // self.block.forward_flops

    @property
    def splits_backwards(self) -> bool:
        """Whether stages leave the gradients of matrices for when nothing else can run."""
        if self.unlike is not None:  # a kind need not be made of matrices
            return False
        return self.recompute != "included" and not self.block.backward_flops

    @property
    def unlike(self) -> UnlikeLayers | None:
        """None where all layers between the ends are alike."""
        return self.block.unlike

    @property
    def boundary_wire_bytes(self) -> int:
        """`boundary_bytes` in the fewest bytes that the run allows both ways."""
        return self.on_the_wire(self.boundary_bytes)

    @property
    def unlike_wire_bytes(self) -> tuple[int, ...]:
        """Wire bytes behind each layer but the last, where layers are unlike; else nothing."""
        unlike = self.unlike
        return () if unlike is None else tuple(map(self.on_the_wire, unlike.boundary_bytes))

    def on_the_wire(self, boundary_bytes: int) -> int:
        """So many bytes of fp32 in the fewest bytes that the run allows both ways."""
        per_kibi = self.boundary_bytes_per_kibi
        if isinstance(per_kibi, AllowedCodecs):
            per_kibi = _fewest_both_ways(per_kibi)
        return -(-boundary_bytes * per_kibi // (FLOAT_BYTES * KIBI))

    def gradient_wire_bytes(self, cost: "LayerCost") -> int:
        """Bytes of a layer's gradient, in one direction, when a replica contributes it."""
        return -(-cost.parameter_count * self.gradient_bytes_per_kibi // KIBI)

    def guarded_bytes(self, cost: "LayerCost") -> int:
        """Bytes of a layer's reduced gradient on its way to the guardian."""
        return -(-cost.parameter_count * self.guarded_bytes_per_kibi // KIBI)

    @property
    def layer_count(self) -> int:
        return self.block_count + 2

    def kind(self, layer: int) -> LayerRole:
        assert 0 <= layer < self.layer_count, layer
        if layer == 0:
            return LayerRole.EMBEDDING
        return LayerRole.BLOCK if layer <= self.block_count else LayerRole.HEAD

    def cost(self, layer: int) -> LayerCost:
        unlike = self.unlike
        if unlike is not None:
            return unlike.costs[unlike.order[layer]]
        cost: LayerCost = getattr(self, self.kind(layer).value)
        return cost


def workload_of(spec: RunSpec) -> Workload:
    """Derive the workload from the run spec.

    Operation counts follow Kaplan et al. 2020, table 1: 2 operations for each parameter of a
    matrix and token, plus attention scores and their use, 4 * context for each token and channel of
    the queries. Where a run lists its layers, these state their sizes.

    Raises `UserError` where listed layers do not: `train.model.kinds` states the sizes after a file
    is read.
    """
    if spec.layers:
        return _of_listed(spec)
    model = spec.model
    tokens = spec.batch.microbatch * model.context
    width, vocabulary = model.width, model.vocabulary
    boundary = tokens * model.boundary_width * FLOAT_BYTES
    positions = model.context if model.position == "learned" else 0
    copies = STATE_COPIES + _private_copies(spec)
    whole = Workload(
        block_count=model.layers,
        microbatch_count=spec.microbatches_per_step,
        evaluation_microbatch_count=spec.evaluation_microbatches,
        boundary_bytes=boundary,
        embedding=_layer_cost(
            (vocabulary + positions) * model.boundary_width,
            boundary,
            tokens * model.boundary_width,
            copies,
        ),
        block=_with_update(
            spec,
            _layer_cost(
                block_parameters(model),
                tokens * saved_values(model) * FLOAT_BYTES,
                block_flops(model, tokens, model.context),
                copies,
            ),
        ),
        head=_layer_cost(
            norm_parameters(model) + vocabulary * width,
            boundary + (tokens * read_by_head(model) + head_values(spec)) * FLOAT_BYTES,
            2 * tokens * width * vocabulary,
            copies,
        ),
        min_members=spec.limits.min_members,
        boundary_bytes_per_kibi=_boundary_codecs(spec.codecs),
        gradient_bytes_per_kibi=reduced_bytes_per_kibi(spec.codecs, spec.codecs.reduction),
        recompute=spec.compute.recompute,
        inner_steps=spec.sync.inner_steps if spec.sync.mode == "local" else 0,
        least_gain_ppm=round(spec.limits.least_gain * _MILLION),
    )
    if model.tied_head and not spec.trains_adapters:
        head = msgspec.structs.replace(whole.head, shared_bytes=FLOAT_BYTES * vocabulary * width)
        whole = msgspec.structs.replace(whole, head=head)
    confined = Confined(
        model.tied_head and not spec.trains_adapters and spec.audit.rate > 0, spec.privacy.ends
    )
    if confined != Confined():
        whole = msgspec.structs.replace(whole, confined=confined)
    return _of_adapters(spec, whole, copies, tokens) if spec.trains_adapters else whole


def _of_listed(spec: RunSpec) -> Workload:
    """The workload of a run that lists its layers. `block` is the mean of the layers between the
    ends, for callers that need only an idea of the work."""
    stated = [layer.sizes for layer in spec.layers]
    sizes = [each for each in stated if each is not None]
    if len(sizes) < len(stated):
        raise UserError(
            f"the layers that {spec.name} lists do not state their sizes yet",
            "found the run with a daemon, which knows their kinds",
        )
    sequences, copies = spec.batch.microbatch, STATE_COPIES + _private_copies(spec)
    each_layer = [
        _layer_cost(
            size.parameters,
            sequences * size.saved_values * FLOAT_BYTES,
            max(1, sequences * size.forward_flops),
            copies,
        )
        for size in sizes
    ]
    distinct = list(dict.fromkeys((layer.kind, cost) for layer, cost in _paired(spec, each_layer)))
    order = [distinct.index((layer.kind, cost)) for layer, cost in _paired(spec, each_layer)]
    boundaries = [FLOAT_BYTES * sequences * size.boundary_values for size in sizes[:-1]]
    between = each_layer[1:-1]
    unlike = UnlikeLayers(tuple(cost for _, cost in distinct), tuple(order), tuple(boundaries))
    count = len(between)
    mean = _layer_cost(
        -(-sum(cost.parameter_count for cost in between) // count),
        -(-sum(cost.saved_bytes for cost in between) // count),
        -(-sum(cost.forward_flops for cost in between) // count),
        copies,
    )
    return Workload(
        block_count=spec.model.layers,
        microbatch_count=spec.microbatches_per_step,
        evaluation_microbatch_count=spec.evaluation_microbatches,
        boundary_bytes=max(boundaries),
        embedding=each_layer[0],
        block=msgspec.structs.replace(mean, unlike=unlike),
        head=each_layer[-1],
        min_members=spec.limits.min_members,
        boundary_bytes_per_kibi=_boundary_codecs(spec.codecs),
        gradient_bytes_per_kibi=reduced_bytes_per_kibi(spec.codecs, spec.codecs.reduction),
        recompute=spec.compute.recompute,
        inner_steps=spec.sync.inner_steps if spec.sync.mode == "local" else 0,
        least_gain_ppm=round(spec.limits.least_gain * _MILLION),
    )


def _paired(spec: RunSpec, costs: list[LayerCost]) -> "zip[tuple[ListedLayer, LayerCost]]":
    return zip(spec.layers, costs, strict=True)


def _of_adapters(spec: RunSpec, whole: Workload, copies: int, tokens: int) -> Workload:
    """The workload of the same model frozen, with adapters beside some matrices of its blocks.

    Embedding and head train nothing. Since every layer must have a state, they have one element
    (`train.model.lora.adapted`). A tied head is frozen like the embedding, so the two can lie with
    different peers.
    """
    model, rank = spec.model, spec.lora.rank
    adapters = adapted_matrices(model, spec.lora)
    count = sum(adapter.parameter_count(rank) for adapter in adapters)

    def frozen(cost: LayerCost, trained: int, matrices: int, more_saved: int = 0) -> LayerCost:
        more = 2 * tokens * trained if trained > 1 else 0
        return msgspec.structs.replace(
            cost,
            parameter_count=trained,
            state_bytes=FLOAT_BYTES * (cost.parameter_count + copies * trained),
            frozen_bytes=FLOAT_BYTES * cost.parameter_count,
            saved_bytes=cost.saved_bytes + more_saved,
            forward_flops=cost.forward_flops + more,
            backward_flops=max(1, 2 * cost.forward_flops - 2 * tokens * matrices + 2 * more),
        )

    narrow = tokens * rank * len(adapters) * FLOAT_BYTES
    return msgspec.structs.replace(
        whole,
        embedding=frozen(whole.embedding, 1, model.width),
        block=frozen(whole.block, count, block_matrices(model), narrow),
        head=frozen(whole.head, 1, model.width * model.vocabulary),
    )


def _with_update(spec: RunSpec, block: LayerCost) -> LayerCost:
    """The block's cost with the operations of Muon's updates, and without the second moments that
    its inner steps do not keep."""
    unneeded = 0
    if spec.optimizer.kind == "muon" and spec.sync.mode == "local":
        unneeded = _SECOND_MOMENTS * FLOAT_BYTES * block_matrices(spec.model)
    return msgspec.structs.replace(
        block, state_bytes=block.state_bytes - unneeded, update_flops=_update_flops(spec)
    )


def _update_flops(spec: RunSpec) -> int:
    """Operations of a block's update, where Muon makes its matrices orthogonal; otherwise they are
    not counted. Each iteration has three products of matrices. To be exact on any device they are
    in float64, half as fast on a processor, and count twice; inner steps need not be exact."""
    if spec.optimizer.kind != "muon":
        return 0
    model = spec.model
    width, hidden, inputs = model.width, model.hidden_width, hidden_inputs(model)
    shapes = [(width, model.query_width)] + [(width, model.key_width)] * 2
    shapes += [(model.boundary_width, model.query_width), (model.boundary_width, hidden)]
    shapes += [(width, hidden)] * inputs
    once = sum(2 * small * small * (2 * large + small) for small, large in map(sorted, shapes))
    return MUON_ITERATIONS * once * (1 if spec.sync.mode == "local" else 2)


def reduced_bytes_per_kibi(codecs: CodecSpec, reduction: str) -> int:
    """Bytes of 1024 values in the reduction. `sparse` offers one value in `one_in`. Each offered
    one has a mark of one bit, unless all are kept, and each kept one takes `bits`."""
    if reduction != "sparse":
        return CODEC_BYTES_PER_KIBI[reduction]
    sparse = codecs.sparse
    offered = -(-KIBI // sparse.one_in)
    kept = -(-offered * sparse.keep_percent // 100)
    marks = offered if sparse.keep_percent < 100 else 0
    return max(1, -(-(kept * sparse.bits + marks) // 8))


def _boundary_codecs(codecs: CodecSpec) -> int | AllowedCodecs:
    """A boundary's bytes where the run names one codec each way; else the allowed codecs."""
    allowed = AllowedCodecs(codecs.activations, codecs.gradients)
    one_each = len(allowed.activations) == len(allowed.gradients) == 1
    return _fewest_both_ways(allowed) if one_each else allowed


def _fewest_both_ways(allowed: AllowedCodecs) -> int:
    return max(_fewest_bytes(allowed.activations), _fewest_bytes(allowed.gradients))


def _fewest_bytes(codecs: Iterable[str]) -> int:
    return min(CODEC_BYTES_PER_KIBI[codec] for codec in codecs)


def _private_copies(spec: RunSpec) -> int:
    """Copies of each parameter that a replica keeps to itself. Local steps need their own
    parameters, and their moments as of the last commit and as of now. A lossy reduction needs what
    is still owed, as of the last commit and as of now."""
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
