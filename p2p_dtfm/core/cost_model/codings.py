"""What a codec costs at a boundary: bytes on the wire, and time at both ends.

The thread that computes also encodes. No peer measures how fast that is: the model counts
operations for each value, at the rate at which a peer computes a block.
"""

from collections.abc import Iterable
from itertools import repeat
from typing import NamedTuple

from p2p_dtfm.core.protocol.plan import Pipeline
from p2p_dtfm.core.protocol.run_spec import Codec
from p2p_dtfm.core.protocol.workload import (
    CODEC_BYTES_PER_KIBI,
    FLOAT_BYTES,
    KIBI,
    AllowedCodecs,
    Workload,
)

CODING_OPERATIONS = {
    "fp32": (0, 0),
    "bf16": (12, 8),
    "fp16": (40, 24),
    "int8": (120, 24),
    "rotated4": (1000, 800),
    "rotated6": (1000, 800),
    "subspace": (3000, 600),
}
"""Operations to encode and to decode a value, as measured on a processor of 97 GFLOP/s. The last
three were measured on a busy one of 52. `subspace` was at a width of 768, with which it grows."""
_MILLION = 1_000_000


class Coding(NamedTuple):
    """A boundary tensor of one microbatch in a codec; ppm are millionths of a block's forward."""

    name: Codec
    wire_bytes: int
    encode_ppm: int
    decode_ppm: int

    def encode_ns(self, block_forward_ns: int) -> int:
        """Time to encode, rounded up, as the time to decode is."""
        return -(-block_forward_ns * self.encode_ppm // _MILLION)

    def decode_ns(self, block_forward_ns: int) -> int:
        return -(-block_forward_ns * self.decode_ppm // _MILLION)


class Edge(NamedTuple):
    """The codings between two neighbours in a pipeline."""

    activation: Coding
    gradient: Coding

    @property
    def names(self) -> tuple[Codec, Codec]:
        return self.activation.name, self.gradient.name


Edges = tuple[Edge, ...]
"""The edges of a pipeline in its order; empty where the run leaves no choice."""


class Codings(NamedTuple):
    """The codings that a run allows; it prefers the first."""

    activations: tuple[Coding, ...]
    gradients: tuple[Coding, ...]


def codings_of(workload: Workload) -> Codings | None:
    """The codings that a run allows; None where it leaves no choice."""
    allowed = workload.boundary_bytes_per_kibi
    if not isinstance(allowed, AllowedCodecs):
        return None
    return Codings(
        tuple(map(coding_of, repeat(workload), allowed.activations)),
        tuple(map(coding_of, repeat(workload), allowed.gradients)),
    )


def coding_of(workload: Workload, name: Codec) -> Coding:
    values = workload.boundary_bytes // FLOAT_BYTES
    size = -(-values * CODEC_BYTES_PER_KIBI[name] // KIBI)
    encode, decode = (
        _MILLION * values * operations // workload.block.forward_flops
        for operations in CODING_OPERATIONS[name]
    )
    return Coding(name, size, encode, decode)


def edges_of_unlike_layers(boundary_bytes: tuple[int, ...], cuts: Iterable[int]) -> Edges:
    """The edges of a pipeline of unlike layers, each as wide as the layer before it.
    `boundary_bytes` are on the wire, of all layers but the last. Such a run has one codec alone."""
    codings = (Coding("fp32", boundary_bytes[cut - 1], 0, 0) for cut in cuts)
    return tuple(Edge(coding, coding) for coding in codings)


def edges_of(workload: Workload, pipeline: Pipeline) -> Edges:
    """The edges of a pipeline as its plan says them."""
    if workload.unlike is not None:
        cuts = (stage.first_layer for stage in pipeline.stages[1:])
        return edges_of_unlike_layers(workload.unlike_wire_bytes, cuts)
    return tuple(
        Edge(coding_of(workload, activation), coding_of(workload, gradient))
        for activation, gradient in pipeline.codecs
    )


def boundary_loads(workload: Workload, pipeline: Pipeline) -> list[tuple[int, int]]:
    """Bytes of a step over each boundary of a pipeline, forwards and backwards."""
    count, edges = pipeline.microbatch_count, edges_of(workload, pipeline)
    if not edges:
        load = count * workload.boundary_wire_bytes
        return [(load, load)] * (len(pipeline.stages) - 1)
    return [(count * e.activation.wire_bytes, count * e.gradient.wire_bytes) for e in edges]


def coding_ns(edges: Edges, position: int, block_forward_ns: int) -> tuple[int, int]:
    """Time that the stage at this position codes with each forward, and with each backward."""
    forward = backward = 0
    if edges and position > 0:
        before = edges[position - 1]
        forward += before.activation.decode_ns(block_forward_ns)
        backward += before.gradient.encode_ns(block_forward_ns)
    if edges and position < len(edges):
        after = edges[position]
        forward += after.activation.encode_ns(block_forward_ns)
        backward += after.gradient.decode_ns(block_forward_ns)
    return forward, backward


def tensor_bytes(edges: Edges, position: int) -> tuple[int, int]:
    """Bytes that this stage and the next send each other; zeros where nothing is chosen."""
    if position >= len(edges):
        return 0, 0
    return edges[position].activation.wire_bytes, edges[position].gradient.wire_bytes
