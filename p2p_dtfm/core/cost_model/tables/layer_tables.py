"""What layers take: time on a peer, memory, and bytes on the wire."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, LayerCost, Workload
from p2p_dtfm.core.schedule.tasklets import weight_part_ns

FETCHED_PARTS = 3
"""Parts of a layer's state that are fetched: parameters and two moments, each as large as its
gradient."""
Kinds = tuple[int, int, int, int, int]
"""The numbers of embeddings, blocks and heads in a range of layers, and its first layer and end.
Where layers are unlike, the range itself is needed."""


def kinds_in(first: int, end: int, layer_count: int) -> Kinds:
    """The kinds of the layers `first .. end - 1`."""
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
        """Time of the whole backward, including what a split leaves for later."""
        embeddings, blocks, heads, _, _ = kinds
        return (
            embeddings * self.embedding_backward_ns
            + blocks * self.block_backward_ns
            + heads * self.head_backward_ns
        )

    def update_ns(self, kinds: Kinds, block_update_ppm: int) -> int:
        """Time of an update of these layers."""
        return kinds[1] * self.block_forward_ns * block_update_ppm // 1_000_000

    def last_part_ns(self, kinds: Kinds, splits: bool) -> int:
        """Time of the last part of a microbatch, in which the gradients become final: what a split
        leaves of the backward, or else all of it."""
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
    """Times of layers that a run lists; `block` is the mean of those between the ends."""

    forwards_ns: tuple[int, ...]
    """The forward of each layer."""
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
    """The times of unlike layers, from those of each layer, the ends included."""
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
    """Bytes that one layer of a kind occupies or sends."""

    state_bytes: int
    saved_bytes: int
    gradient_elements: int
    gradient_bytes: int
    """On the wire, in one direction, when a replica contributes its gradient."""
    guarded_bytes: int
    """On the wire, when the only holder sends its guardian the reduced gradient."""
    shared_bytes: int = 0
    """On the wire, when the ends of a pipeline give each other the sums of a tied matrix."""
    frozen_bytes: int = 0
    """Bytes of frozen parameters, which are in the state and are fetched once."""

    @property
    def fetched_bytes(self) -> int:
        """Bytes that a peer fetches when it gets the layer: parameters, two moments, and what is
        frozen. What a replica keeps to itself nobody sends."""
        return FETCHED_PARTS * self.followed_bytes + self.frozen_bytes

    @property
    def followed_bytes(self) -> int:
        """Bytes of the layer's gradient, uncoded. A peer that fetches the layer gets it with each
        step as well."""
        return FLOAT_BYTES * self.gradient_elements

    @property
    def needed_bytes(self) -> int:
        """Bytes of the layer with one microbatch in flight."""
        return self.state_bytes + self.saved_bytes

    def with_sums(self, sums: int) -> "LayerBytes":
        """The layer with so many copies of its gradient beside its state."""
        return replace(self, state_bytes=self.state_bytes + sums * self.followed_bytes)


@dataclass(frozen=True)
class LayerTable:
    """What all layers of the model take."""

    block_count: int
    embedding: LayerBytes
    block: LayerBytes
    head: LayerBytes
    unlike: tuple[LayerBytes, ...] = ()
    """Each layer, where a run lists them. Then `block` is the mean of those between the ends."""

    @property
    def count(self) -> int:
        return self.block_count + 2

    def of(self, layer: int) -> LayerBytes:
        if self.unlike:
            return self.unlike[layer]
        if layer == 0:
            return self.embedding
        return self.block if layer <= self.block_count else self.head

    def with_sums(self, sums: int) -> "LayerTable":
        """The layers with so many copies of each gradient beside its state."""
        return replace(
            self,
            embedding=self.embedding.with_sums(sums),
            block=self.block.with_sums(sums),
            head=self.head.with_sums(sums),
            unlike=tuple(layer.with_sums(sums) for layer in self.unlike),
        )

    def state_bytes(self, first: int, end: int) -> int:
        """State bytes of the layers `first .. end - 1`."""
        return self._total(first, end, lambda layer: layer.state_bytes)

    def saved_bytes(self, first: int, end: int) -> int:
        """Saved bytes of the layers `first .. end - 1`, for each microbatch in flight."""
        return self._total(first, end, lambda layer: layer.saved_bytes)

    def _total(self, first: int, end: int, bytes_of: Callable[[LayerBytes], int]) -> int:
        if self.unlike:
            return sum(map(bytes_of, self.unlike[first:end]))
        embeddings, blocks, heads, _, _ = kinds_in(first, end, self.count)
        return (
            embeddings * bytes_of(self.embedding)
            + blocks * bytes_of(self.block)
            + heads * bytes_of(self.head)
        )


def layer_sizes(workload: Workload) -> LayerTable:
    """The layers of a run."""
    return LayerTable(
        workload.block_count,
        _layer_bytes(workload, workload.embedding),
        _layer_bytes(workload, workload.block),
        _layer_bytes(workload, workload.head),
        _unlike_bytes(workload),
    )


def _layer_bytes(workload: Workload, cost: LayerCost) -> LayerBytes:
    return LayerBytes(
        cost.state_bytes,
        cost.saved_bytes,
        cost.parameter_count,
        workload.gradient_wire_bytes(cost),
        workload.guarded_bytes(cost),
        cost.shared_bytes,
        cost.frozen_bytes,
    )


def _unlike_bytes(workload: Workload) -> tuple[LayerBytes, ...]:
    if workload.unlike is None:
        return ()
    return tuple(
        _layer_bytes(workload, workload.cost(layer)) for layer in range(workload.layer_count)
    )


def layer_ns_of(device: Device, workload: Workload) -> LayerNs:
    """The times of a device. A layer that took no measurable time counts one nanosecond."""
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
