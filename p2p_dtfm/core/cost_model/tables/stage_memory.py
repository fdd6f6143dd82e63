"""Memory that a stage takes of what its peer offers: one rule for plans, views and simulated steps.

A stage that recomputes keeps only the inputs of its layers, and what one layer saves while it goes
back through that: the wider of the two kinds counts, the head's where it is held.
"""

from dataclasses import dataclass, replace
from functools import lru_cache

from p2p_dtfm.core.cost_model.tables.layer_tables import LayerTable, layer_sizes
from p2p_dtfm.core.protocol.workload import Workload


@dataclass(frozen=True)
class StageMemory:
    """Of the stages of a run."""

    layers: LayerTable
    """As they are where nothing is computed again."""
    again: LayerTable
    """Where all is: what is kept for each microbatch in flight."""
    once_bytes: int
    """There, besides, for the layer that it goes back through."""
    recompute: str
    """As the workload says it."""

    def recomputes(self, first: int, end: int, in_flight: int, offered_bytes: int) -> bool:
        """Whether the stage with the layers `first .. end - 1` does, on a peer that offers so
        much."""
        if self.recompute != "auto":
            return self.recompute == "always"
        return _used_bytes(self.layers, first, end, in_flight) > offered_bytes

    def used_bytes(self, first: int, end: int, in_flight: int, offered_bytes: int) -> int:
        """What it takes there."""
        if self.recomputes(first, end, in_flight, offered_bytes):
            return _used_bytes(self.again, first, end, in_flight) + self.once_bytes
        return _used_bytes(self.layers, first, end, in_flight)


@lru_cache(maxsize=8)
def stage_memory(workload: Workload) -> StageMemory:
    """Of a run."""
    layers = layer_sizes(workload)
    again, once_bytes = (_unlike_again if layers.unlike else _alike_again)(layers, workload)
    return StageMemory(layers, again, once_bytes, workload.recompute)


def _used_bytes(layers: LayerTable, first: int, end: int, in_flight: int) -> int:
    return layers.state_bytes(first, end) + in_flight * layers.saved_bytes(first, end)


def _alike_again(layers: LayerTable, workload: Workload) -> tuple[LayerTable, int]:
    """What each layer keeps, and what is saved once."""
    entry_bytes = workload.boundary_bytes
    block, head = layers.block, layers.head
    once = block.saved_bytes
    sizes = replace(
        layers,
        block=replace(block, saved_bytes=min(block.saved_bytes, entry_bytes)),
        head=replace(
            head,
            state_bytes=head.state_bytes + max(0, head.saved_bytes - once),
            saved_bytes=min(head.saved_bytes, entry_bytes),
        ),
    )
    return sizes, once


def _unlike_again(layers: LayerTable, workload: Workload) -> tuple[LayerTable, int]:
    """The same where each layer saves, and is entered with, its own; the most counts once."""
    boundaries = workload.unlike.boundary_bytes if workload.unlike is not None else ()
    once = max(layer.saved_bytes for layer in layers.unlike)
    kept = tuple(
        replace(layer, saved_bytes=min(layer.saved_bytes, entry_bytes))
        for layer, entry_bytes in zip(layers.unlike, (boundaries[0], *boundaries), strict=True)
    )
    return replace(layers, unlike=kept), once
