"""How a plan's tensors travel: who sums which part of a segment, and which codecs boundaries have.

A pure function of run spec, plan and snapshot, so both ends of a link know it alike. A frame that
says otherwise is its sender's fault.
"""

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem, problem_of
from p2p_dtfm.core.cost_model.segment_weights import segment_weights
from p2p_dtfm.core.cost_model.tables.layer_tables import kinds_in
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Segment
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, workload_of
from p2p_dtfm.core.schedule.pieces import CHUNK_ELEMENTS, pieces_of

LEAST_CHUNK_ELEMENTS = 1 << 15
CHUNKS_PER_S = 100
"""Chunks are so small that a slow link carries so many a second. While a chunk is written, all
later ones wait, and its sum waits for the whole chunk."""
CHUNKS_ENOUGH = 32
"""Chunks of a segment that travels for long. A hundred would be there no sooner, and an audited
claim has digests of all."""

CODEC_PERCENT = {
    "fp32": 100,
    "fp16": 50,
    "bf16": 50,
    "int8": 26,
    "rotated4": 13,
    "rotated6": 19,
    "subspace": 12,
}
"""Bytes of a boundary tensor in a codec, against fp32."""


class Chunks(NamedTuple):
    """The parts into which a segment's flat gradient is cut, in order, and who sums each."""

    bounds: tuple[tuple[int, int], ...]
    owners: tuple[str, ...]


class BoundaryCodecs(NamedTuple):
    """The codecs between two neighbours in a pipeline."""

    activation: str
    gradient: str


class WirePlan(NamedTuple):
    """`chunks` are by the first layer of each segment with several holders. `boundaries` are by
    (sender, receiver) of the activation; the gradient goes the other way."""

    chunks: dict[int, Chunks]
    boundaries: dict[tuple[str, str], BoundaryCodecs]


def wire_plan(spec: RunSpec, plan: Plan, snapshot: Snapshot | None) -> WirePlan:
    """The wire plan of a plan. Without a snapshot all holders own equal parts, and the first
    allowed codecs are taken."""
    workload = workload_of(spec)
    problem = None if snapshot is None else problem_of(snapshot)
    chunks = {}
    shared = [segment for segment in plan.segments() if len(segment.holders) > 1]
    lengths = [[workload.cost(x).parameter_count for x in each.layers] for each in shared]
    weights = _weights(shared, [sum(each) for each in lengths], problem)
    for segment, each, parts in zip(shared, lengths, weights, strict=True):
        at_most = _chunk_elements(segment, sum(each), problem)
        chunks[segment.first_layer] = segment_chunks(each, segment.holders, parts, at_most)
    boundaries = {}
    for pipeline in plan.pipelines:
        for number, (before, after) in enumerate(pairwise(pipeline.stages)):
            edge = (before.peer_id, after.peer_id)
            if pipeline.codecs:
                boundaries[edge] = BoundaryCodecs(*pipeline.codecs[number])
            else:
                boundaries[edge] = _boundary_codecs(spec, pipeline, edge, problem)
    return WirePlan(chunks, boundaries)


def segment_chunks(
    lengths: Sequence[int],
    holders: tuple[str, ...],
    weights: Sequence[int],
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Chunks:
    """The chunks of a segment's pieces, each piece shared out by weight."""
    bounds: list[tuple[int, int]] = []
    owners: list[str] = []
    for piece in reversed(pieces_of(lengths, len(holders))):
        start = sum(lengths[: piece.start])
        length = sum(lengths[piece.start : piece.stop])
        chunks = cut_into_chunks(length, holders, weights, chunk_elements)
        bounds += ((start + first, start + end) for first, end in chunks.bounds)
        owners += chunks.owners
    return Chunks(tuple(bounds), tuple(owners))


def cut_into_chunks(
    length: int,
    holders: tuple[str, ...],
    weights: Sequence[int],
    chunk_elements: int = CHUNK_ELEMENTS,
) -> Chunks:
    """Each holder owns a range in proportion to its weight, cut into equal chunks of at most
    `chunk_elements`. A range may be empty."""
    total = sum(weights)
    ends = [length * weight // total for weight in accumulate(weights)]
    bounds: list[tuple[int, int]] = []
    owners: list[str] = []
    for holder, (start, end) in zip(holders, pairwise([0, *ends]), strict=True):
        count = -(-(end - start) // chunk_elements)
        cuts = [start + (end - start) * n // max(1, count) for n in range(count + 1)]
        bounds += pairwise(cuts)
        owners += [holder] * count
    return Chunks(tuple(bounds), tuple(owners))


def _chunk_elements(segment: Segment, length: int, problem: PlanningProblem | None) -> int:
    """Most elements of a chunk, for a segment of `length` elements; the usual limit where nothing
    is known of links."""
    if problem is None:
        return CHUNK_ELEMENTS
    number_of, rates = _numbers(problem), problem.links.bytes_per_s
    holders = [number_of[holder] for holder in segment.holders]
    slowest = min(rates[a][b] for a in holders for b in holders if a != b)
    in_time = slowest // (CHUNKS_PER_S * FLOAT_BYTES)
    wanted = max(LEAST_CHUNK_ELEMENTS, in_time, length // CHUNKS_ENOUGH)
    return min(CHUNK_ELEMENTS, wanted)


def _numbers(problem: PlanningProblem) -> dict[str, int]:
    return {peer: number for number, peer in enumerate(problem.peer_ids)}


def _weights(
    segments: Sequence[Segment], lengths: Sequence[int], problem: PlanningProblem | None
) -> list[tuple[int, ...]]:
    """The holders' weights, as `costs` takes them to predict the reduction; equal ones without a
    problem."""
    if problem is None:
        return [(1,) * len(segment.holders) for segment in segments]
    numbers = _numbers(problem)
    rates, up, down = (
        problem.links.pair_bytes_per_s,
        problem.links.uplink_bytes_per_s,
        problem.links.downlink_bytes_per_s,
    )
    divided = [
        (tuple(sorted(numbers[holder] for holder in segment.holders)), length)
        for segment, length in zip(segments, lengths, strict=True)
    ]
    found = segment_weights(divided, lambda a, b: rates[a][b], lambda a: min(up[a], down[a]))
    result = []
    for segment, (holders, _), weights in zip(segments, divided, found, strict=True):
        of = dict(zip(holders, weights, strict=True))
        result.append(tuple(of[numbers[holder]] for holder in segment.holders))
    return result


def _boundary_codecs(
    spec: RunSpec, pipeline: Pipeline, edge: tuple[str, str], problem: PlanningProblem | None
) -> BoundaryCodecs:
    allowed = spec.codecs
    if problem is None:
        return BoundaryCodecs(allowed.activations[0], allowed.gradients[0])
    before, after = (problem.peer_ids.index(peer_id) for peer_id in edge)
    limit_ns = max(
        _microbatch_ns(problem, stage.peer_id, stage.layers) for stage in pipeline.stages
    )
    ends = {pipeline.stages[0].peer_id, pipeline.stages[-1].peer_id}
    tensors = [1 if peer_id in ends else 2 for peer_id in edge]

    def rate(a: int, b: int, sent: int, received: int) -> int:
        """The rate of one tensor, where a middle stage sends, and receives, two at a time."""
        up, down = problem.links.uplink_bytes_per_s[a], problem.links.downlink_bytes_per_s[b]
        return min(problem.links.bytes_per_s[a][b], up // sent, down // received)

    first_layer = next(s.first_layer for s in pipeline.stages if s.peer_id == edge[1])
    shape = spec.boundary_shape(first_layer)
    size_bytes = math.prod(shape) * FLOAT_BYTES
    return BoundaryCodecs(
        _codec(allowed.activations, rate(before, after, *tensors), limit_ns, size_bytes),
        _codec(allowed.gradients, rate(after, before, *tensors[::-1]), limit_ns, size_bytes),
    )


def _codec(allowed: tuple[str, ...], bytes_per_s: int, limit_ns: int, size_bytes: int) -> str:
    """The first codec in which a tensor travels while the busiest stage computes a microbatch, so
    that the link holds up nobody. If there is none, the codec with the fewest bytes."""
    for codec in allowed:
        if duration_ns(size_bytes * CODEC_PERCENT[codec] // 100, max(1, bytes_per_s)) <= limit_ns:
            return codec
    return min(allowed, key=lambda codec: (CODEC_PERCENT[codec], codec))


def _microbatch_ns(problem: PlanningProblem, peer_id: str, layers: range) -> int:
    times = problem.devices.layer_ns[problem.peer_ids.index(peer_id)]
    kinds = kinds_in(layers.start, layers.stop, problem.layer_count)
    return times.forward_ns(kinds) + times.backward_ns(kinds)
