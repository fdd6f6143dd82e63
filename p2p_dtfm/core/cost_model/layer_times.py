"""How long a peer computes for a microbatch: at a layer of each kind, and at a stage of them.

Layer 0 is the embedding, the last one the head, and blocks lie between.
"""

from dataclasses import dataclass

from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.schedule.tasklets import weight_part_ns

Kinds = tuple[int, int, int]
"""How many embeddings, blocks and heads."""


def kinds_in(first: int, end: int, layer_count: int) -> Kinds:
    """Of the layers `first .. end - 1`."""
    if first >= end:
        return 0, 0, 0
    head = layer_count - 1
    return int(first == 0), min(end, head) - max(first, 1), int(end > head)


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
        embeddings, blocks, heads = kinds
        return (
            embeddings * self.embedding_forward_ns
            + blocks * self.block_forward_ns
            + heads * self.head_forward_ns
        )

    def backward_ns(self, kinds: Kinds) -> int:
        """With what a split leaves for later."""
        embeddings, blocks, heads = kinds
        return (
            embeddings * self.embedding_backward_ns
            + blocks * self.block_backward_ns
            + heads * self.head_backward_ns
        )

    def last_part_ns(self, kinds: Kinds, splits: bool) -> int:
        """The last part of a microbatch, in which the gradients become final: what a split leaves
        of the backward, else all of it."""
        if not splits:
            return self.backward_ns(kinds)
        embeddings, blocks, heads = kinds
        return (
            embeddings * weight_part_ns(self.embedding_forward_ns, self.embedding_backward_ns)
            + blocks * weight_part_ns(self.block_forward_ns, self.block_backward_ns)
            + heads * weight_part_ns(self.head_forward_ns, self.head_backward_ns)
        )


def layer_ns_of(device: Device) -> LayerNs:
    """A layer that took no measurable time counts one nanosecond."""
    return LayerNs(
        max(1, device.embedding.forward_ns),
        max(1, device.embedding.backward_ns),
        max(1, device.block.forward_ns),
        max(1, device.block.backward_ns),
        max(1, device.head.forward_ns),
        max(1, device.head.backward_ns),
    )
