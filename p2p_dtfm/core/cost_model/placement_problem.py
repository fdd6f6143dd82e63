"""What planning works on: a snapshot as flat integer tables, peers as numbers 0 .. n-1."""

from collections.abc import Container, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

from p2p_dtfm.core.cost_model.codings import Codings, codings_of
from p2p_dtfm.core.cost_model.links.swarm_links import (
    UNLIMITED_BYTES_PER_S as UNLIMITED_BYTES_PER_S,
)
from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks, limit
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.records import ACCELERATOR, Device, Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.core.schedule.tasklets import weight_part_ns

MESSAGE_NS = 100_000
"""Framing, checksum and hand-over of one message, for which its link is taken."""

Matrix = tuple[tuple[int, ...], ...]


Kinds = tuple[int, int, int, int, int]
"""How many embeddings, blocks and heads there are among some layers, and their first and end: where
layers are unlike it counts which they are."""


def kinds_in(first: int, end: int, layer_count: int) -> Kinds:
    """Of the layers `first .. end - 1`."""
    if first >= end:
        return 0, 0, 0, first, first
    head = layer_count - 1
    return int(first == 0), min(end, head) - max(first, 1), int(end > head), first, end


@dataclass(frozen=True, slots=True)
class LayerNs:
    """Forward and backward time of the layer kinds on one peer, for one microbatch."""

    embedding_forward_ns: int
    embedding_backward_ns: int
    block_forward_ns: int
    block_backward_ns: int
    head_forward_ns: int
    head_backward_ns: int

    @property
    def embedding_ns(self) -> int:
        return self.embedding_forward_ns + self.embedding_backward_ns

    @property
    def block_ns(self) -> int:
        return self.block_forward_ns + self.block_backward_ns

    @property
    def head_ns(self) -> int:
        return self.head_forward_ns + self.head_backward_ns

    def forward_ns(self, kinds: Kinds) -> int:
        embeddings, blocks, heads, _, _ = kinds
        return (
            embeddings * self.embedding_forward_ns
            + blocks * self.block_forward_ns
            + heads * self.head_forward_ns
        )

    def backward_ns(self, kinds: Kinds) -> int:
        """With what a split leaves for later."""
        embeddings, blocks, heads, _, _ = kinds
        return (
            embeddings * self.embedding_backward_ns
            + blocks * self.block_backward_ns
            + heads * self.head_backward_ns
        )

    def update_ns(self, kinds: Kinds, block_update_ppm: int) -> int:
        """Of an update of these layers."""
        return kinds[1] * self.block_forward_ns * block_update_ppm // 1_000_000

    def last_part_ns(self, kinds: Kinds, splits: bool) -> int:
        """The last part of a microbatch, in which the gradients become final: what a split leaves
        of the backward, else all of it."""
        if not splits:
            return self.backward_ns(kinds)
        embeddings, blocks, heads, _, _ = kinds
        return (
            embeddings * weight_part_ns(self.embedding_forward_ns, self.embedding_backward_ns)
            + blocks * weight_part_ns(self.block_forward_ns, self.block_backward_ns)
            + heads * weight_part_ns(self.head_forward_ns, self.head_backward_ns)
        )


@dataclass(frozen=True, slots=True)
class UnlikeNs(LayerNs):
    """Of layers that a run lists; a block is the mean of those between the ends."""

    forwards_ns: tuple[int, ...]
    """Of each layer."""
    backwards_ns: tuple[int, ...]

    def forward_ns(self, kinds: Kinds) -> int:
        return sum(self.forwards_ns[kinds[3] : kinds[4]])

    def backward_ns(self, kinds: Kinds) -> int:
        return sum(self.backwards_ns[kinds[3] : kinds[4]])

    def last_part_ns(self, kinds: Kinds, splits: bool) -> int:
        if not splits:
            return self.backward_ns(kinds)
        here = slice(kinds[3], kinds[4])
        return sum(map(weight_part_ns, self.forwards_ns[here], self.backwards_ns[here]))


def unlike_ns(forwards_ns: tuple[int, ...], backwards_ns: tuple[int, ...]) -> UnlikeNs:
    """Of each layer, the first and the last among them."""
    count = len(forwards_ns) - 2
    return UnlikeNs(
        forwards_ns[0],
        backwards_ns[0],
        -(-sum(forwards_ns[1:-1]) // count),
        -(-sum(backwards_ns[1:-1]) // count),
        forwards_ns[-1],
        backwards_ns[-1],
        forwards_ns,
        backwards_ns,
    )


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """What one layer of a kind occupies or sends."""

    state_bytes: int
    saved_bytes: int
    gradient_elements: int
    gradient_bytes: int
    """On the wire, in one direction, when a replica contributes its gradient."""
    guarded_bytes: int
    """On the wire, when the only holder sends its guardian the reduced gradient."""
    shared_bytes: int = 0
    """On the wire, when the ends of a pipeline give each other the sums of a tied matrix."""


@dataclass(frozen=True)
class PlanningProblem:
    """Everything that the cost model knows. Matrices are indexed [from][to].

    `peer_ids` are sorted and are those who may hold a stage; `idle` are members who may not.
    """

    peer_ids: tuple[str, ...]
    idle: tuple[str, ...]
    block_count: int
    microbatch_count: int
    boundary_bytes: int
    """On the wire; where the run allows several codecs, in the fewest."""
    embedding: LayerBytes
    block: LayerBytes
    head: LayerBytes
    layer_ns: tuple[LayerNs, ...]
    memory_bytes: tuple[int, ...]
    uplink_bytes_per_s: tuple[int, ...]
    downlink_bytes_per_s: tuple[int, ...]
    latency_ns: Matrix
    """One way."""
    bytes_per_s: Matrix
    """Of one flow: the link's own rate, the sender's uplink and the receiver's downlink."""
    transmit_ns: Matrix
    """Of `boundary_bytes`, and the handling of one message."""
    pair_bytes_per_s: Matrix
    """Of the link itself, the slower direction; symmetric."""
    watchers: "Watchers"
    splits_backwards: bool = False
    """Whether stages after the first leave the gradients of matrices for later."""
    one_stage: bool = False
    """Whether each pipeline is a single peer, which holds all layers."""
    ends: frozenset[int] | None = None
    """Members, watchers among them, that alone may have the first and the last layer; None: all."""
    inner_steps: int = 0
    """Of each pipeline in a step; 0: replicas do not step alone."""
    block_update_ppm: int = 0
    """Of a block's forward: what an update of the block takes."""
    codings: Codings | None = None
    """Of boundaries, where the run allows several."""
    unlike: tuple[LayerBytes, ...] = ()
    """Each layer, where a run lists them; `block` is then the mean of those between the ends."""
    unlike_boundaries: tuple[int, ...] = ()
    """On the wire, behind each of these layers but the last; `boundary_bytes` is the largest."""

    @property
    def peer_count(self) -> int:
        return len(self.peer_ids)

    @property
    def layer_count(self) -> int:
        return self.block_count + 2

    @property
    def most_stages(self) -> int:
        """In a pipeline."""
        return 1 if self.one_stage else self.layer_count

    def may_have(self, peer: int, layer: int) -> bool:
        """Whether the run leaves this layer to this member."""
        return self.ends is None or 0 < layer < self.layer_count - 1 or peer in self.ends

    def may_hold(self, peer: int, first: int, end: int) -> bool:
        """The same of the layers `first .. end - 1`."""
        return self.ends is None or peer in self.ends or (first > 0 and end < self.layer_count)

    @cached_property
    def reach_bytes_per_s(self) -> tuple[int, ...]:
        """How fast each peer takes part in a reduction: its limits and its median link."""
        middle = self.peer_count // 2
        medians = (sorted(row)[middle] for row in self.pair_bytes_per_s)
        return tuple(map(min, medians, self.uplink_bytes_per_s, self.downlink_bytes_per_s))

    @cached_property
    def farthest_ns(self) -> tuple[int, ...]:
        """One way from each peer to the one that is farthest from it."""
        return tuple(map(max, self.latency_ns))

    def ends_meet_ns(self, placement: Iterable[tuple[int, ...]]) -> int:
        """Until the ends of every pipeline have given each other the sums of a tied matrix."""
        shared_bytes = self.head.shared_bytes
        if not shared_bytes:
            return 0
        ends = [(peers[0], peers[-1]) for peers in placement if len(peers) > 1]
        ways = [way for first, last in ends for way in ((first, last), (last, first))]
        return max(
            (
                MESSAGE_NS
                + self.latency_ns[one][other]
                + duration_ns(shared_bytes, self.bytes_per_s[one][other])
                for one, other in ways
            ),
            default=0,
        )

    def layer_bytes(self, layer: int) -> LayerBytes:
        if self.unlike:
            return self.unlike[layer]
        if layer == 0:
            return self.embedding
        return self.block if layer <= self.block_count else self.head

    def state_bytes(self, first: int, end: int) -> int:
        """Of the layers `first .. end - 1`."""
        if self.unlike:
            return sum(layer.state_bytes for layer in self.unlike[first:end])
        embeddings, blocks, heads, _, _ = kinds_in(first, end, self.layer_count)
        return (
            embeddings * self.embedding.state_bytes
            + blocks * self.block.state_bytes
            + heads * self.head.state_bytes
        )

    def saved_bytes(self, first: int, end: int) -> int:
        """Of the layers `first .. end - 1`, for each microbatch in flight."""
        if self.unlike:
            return sum(layer.saved_bytes for layer in self.unlike[first:end])
        embeddings, blocks, heads, _, _ = kinds_in(first, end, self.layer_count)
        return (
            embeddings * self.embedding.saved_bytes
            + blocks * self.block.saved_bytes
            + heads * self.head.saved_bytes
        )


@dataclass(frozen=True)
class Watchers:
    """Members that hold no stage but may guard: numbers from `peer_count` on, in `order` with the
    peers as their ids sort them. Links to one are indexed [peer][number - peer_count]."""

    order: tuple[int, ...]
    accelerated: frozenset[int]
    """Whose stage is not in the processor's memory, where guarded layers are."""
    memory_bytes: tuple[int, ...]
    beside_bytes: dict[int, int]
    """Of accelerated peers that say it: their hosts' memory."""
    downlink_bytes_per_s: tuple[int, ...]
    bytes_per_s: Matrix
    round_trip_ns: Matrix


def duration_ns(size_bytes: int, bytes_per_s: int) -> int:
    """Time to send, rounded up."""
    return -(-size_bytes * 1_000_000_000 // bytes_per_s)


def problem_of(snapshot: Snapshot, held_back: Container[str] = ()) -> PlanningProblem:
    """The tables of a snapshot. Only peers that intend to train, and are not `held_back`, may hold
    a stage."""
    records = sorted(snapshot.records, key=lambda record: record.peer_id)
    able = [r for r in records if r.intent is Intent.TRAIN and r.peer_id not in held_back]
    chosen = {record.peer_id for record in able}
    idle = tuple(record.peer_id for record in records if record.peer_id not in chosen)
    workload = snapshot.workload
    links = SwarmLinks(records)
    latency, rate, pair = _link_tables(able, links)
    return PlanningProblem(
        peer_ids=tuple(record.peer_id for record in able),
        idle=idle,
        block_count=workload.block_count,
        microbatch_count=workload.microbatch_count,
        boundary_bytes=workload.boundary_wire_bytes,
        embedding=_layer_bytes(workload, workload.embedding),
        block=_layer_bytes(workload, workload.block),
        head=_layer_bytes(workload, workload.head),
        layer_ns=tuple(layer_ns_of(record.device, workload) for record in able),
        memory_bytes=tuple(record.device.memory_bytes for record in able),
        uplink_bytes_per_s=tuple(limit(record.uplink_bytes_per_s) for record in able),
        downlink_bytes_per_s=tuple(limit(record.downlink_bytes_per_s) for record in able),
        latency_ns=latency,
        bytes_per_s=rate,
        transmit_ns=transmit_table(rate, workload),
        pair_bytes_per_s=pair,
        watchers=_watchers(able, records, links),
        splits_backwards=workload.splits_backwards,
        one_stage=workload.one_stage,
        ends=_ends(workload, [*able, *_others(records)]),
        inner_steps=workload.inner_steps,
        block_update_ppm=workload.block_update_ppm,
        codings=codings_of(workload),
        unlike=_unlike_bytes(workload),
        unlike_boundaries=workload.unlike_wire_bytes,
    )


def _watchers(able: list[PeerRecord], records: list[PeerRecord], links: SwarmLinks) -> Watchers:
    others = _others(records)
    numbers = {record.peer_id: number for number, record in enumerate([*able, *others])}
    flows = [[links.flow(peer, other) for other in others] for peer in able]
    return Watchers(
        order=tuple(numbers[record.peer_id] for record in records if record.peer_id in numbers),
        accelerated=frozenset(
            number for number, record in enumerate(able) if record.device.kind == ACCELERATOR
        ),
        memory_bytes=tuple(record.device.guarding_bytes for record in others),
        beside_bytes={
            number: record.device.guarding_bytes
            for number, record in enumerate(able)
            if record.device.guarding_bytes != record.device.memory_bytes
        },
        downlink_bytes_per_s=tuple(limit(record.downlink_bytes_per_s) for record in others),
        bytes_per_s=tuple(tuple(rate for rate, _ in row) for row in flows),
        round_trip_ns=tuple(tuple(round_trip for _, round_trip in row) for row in flows),
    )


def _others(records: list[PeerRecord]) -> list[PeerRecord]:
    """Who watches, in the order of their numbers."""
    return [r for r in records if r.intent not in (Intent.TRAIN, Intent.LEAVING)]


def _ends(workload: Workload, members: list[PeerRecord]) -> frozenset[int] | None:
    named = () if workload.confined is None else workload.confined.ends
    if not named:
        return None
    return frozenset(n for n, record in enumerate(members) if record.peer_id in named)


def transmit_table(rate: Matrix, workload: Workload) -> Matrix:
    """Time of one boundary tensor over each link; equal rates share one number."""
    known: dict[int, int] = {}
    size = workload.boundary_wire_bytes
    for row in rate:
        for bytes_per_s in row:
            if bytes_per_s not in known:
                known[bytes_per_s] = MESSAGE_NS + duration_ns(size, bytes_per_s)
    return tuple(tuple(map(known.__getitem__, row)) for row in rate)


def _layer_bytes(workload: Workload, cost: LayerCost) -> LayerBytes:
    return LayerBytes(
        cost.state_bytes,
        cost.saved_bytes,
        cost.parameter_count,
        workload.gradient_wire_bytes(cost),
        workload.guarded_bytes(cost),
        cost.shared_bytes,
    )


def _unlike_bytes(workload: Workload) -> tuple[LayerBytes, ...]:
    if workload.unlike is None:
        return ()
    return tuple(
        _layer_bytes(workload, workload.cost(layer)) for layer in range(workload.layer_count)
    )


def layer_ns_of(device: Device, workload: Workload) -> LayerNs:
    """A layer that took no measurable time counts one nanosecond."""
    if workload.unlike is not None:
        times = [timing_of(device, workload, layer) for layer in range(workload.layer_count)]
        forward = tuple(max(1, each.forward_ns) for each in times)
        backward = tuple(max(1, each.backward_ns) for each in times)
        return unlike_ns(forward, backward)
    return LayerNs(
        max(1, device.embedding.forward_ns),
        max(1, device.embedding.backward_ns),
        max(1, device.block.forward_ns),
        max(1, device.block.backward_ns),
        max(1, device.head.forward_ns),
        max(1, device.head.backward_ns),
    )


def _link_tables(records: list[PeerRecord], swarm: SwarmLinks) -> tuple[Matrix, Matrix, Matrix]:
    """(latency, rate of one flow, rate of the slower direction without shared limits)."""
    latency: list[tuple[int, ...]] = []
    raw: list[tuple[int, ...]] = []
    for sender in records:
        links = swarm.ways(sender, records)
        latency.append(tuple(round_trip_ns // 2 for round_trip_ns, _ in links))
        raw.append(tuple(bytes_per_s for _, bytes_per_s in links))
    downlinks = [limit(record.downlink_bytes_per_s) for record in records]
    rate = tuple(
        tuple(map(min, row, downlinks, repeat(limit(record.uplink_bytes_per_s))))
        for record, row in zip(records, raw, strict=True)
    )
    pair = tuple(
        tuple(map(min, row, column))
        for row, column in zip(raw, zip(*raw, strict=True), strict=True)
    )
    return tuple(latency), rate, pair
