"""Memory that a stage takes of what its peer offers: one rule for plans, views and simulated steps.

Beside the state of its layers (parameters, gradient, two moments) a stage holds what gradients come
to. In a plan of one pipeline nobody shares a stage, and this is a copy that is kept until it is
applied. In a plan of several pipelines replicas share all stages. Then it is the sums, and what has
come of the others' parts: half as much as a gradient from one other, nearly as much from many (a
member that makes all sums of many has more: docs/assumptions.md). An accelerator's sums are in its
host's memory, and a scenario's devices count as accelerators.

A stage that recomputes keeps only the inputs of its layers, and what one layer saves while the
stage goes back through it. The wider kind of layer counts, the head where the stage holds it.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from p2p_dtfm.core.cost_model.tables.layer_tables import LayerTable, layer_sizes
from p2p_dtfm.core.protocol.records import PROCESSOR
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, KIBI, Workload

LONE_SUMS = 1
"""Copies of each gradient at a peer that alone holds the layer."""
SHARED_SUMS = 2
"""Copies of each gradient at a peer that shares the layer with replicas."""
OWED_SUMS = 1
"""One more copy where a reduction is lossy: what is owed, while the reduction goes on."""


@dataclass(frozen=True)
class StageMemory:
    """The memory of the stages of a run."""

    layers: LayerTable
    """What layers take where no stage recomputes."""
    again: LayerTable
    """What layers take where stages recompute."""
    once_bytes: int
    """Bytes that a stage that recomputes needs besides, for the layer that it goes back through."""
    recompute: str
    """`Workload.recompute`."""
    shared_sums: int = SHARED_SUMS

    def of(self, kind: str, pipeline_count: int) -> "StageMemory":
        """The memory on a device of this kind, with the sums of a plan of so many pipelines."""
        if kind != PROCESSOR:
            return self
        return self.shared if pipeline_count > 1 else self.alone

    @cached_property
    def alone(self) -> "StageMemory":
        """The memory on a processor, in a plan of one pipeline."""
        return self._beside(LONE_SUMS)

    @cached_property
    def shared(self) -> "StageMemory":
        """The memory on a processor, in a plan of several pipelines."""
        return self._beside(self.shared_sums)

    def _beside(self, sums: int) -> "StageMemory":
        return replace(self, layers=self.layers.with_sums(sums), again=self.again.with_sums(sums))

    def recomputes(self, first: int, end: int, in_flight: int, offered_bytes: int) -> bool:
        """Whether the stage with the layers `first .. end - 1` recomputes, on a peer that offers
        so much."""
        if self.recompute != "auto":
            return self.recompute == "always"
        return _used_bytes(self.layers, first, end, in_flight) > offered_bytes

    def used_bytes(self, first: int, end: int, in_flight: int, offered_bytes: int) -> int:
        """Bytes that the stage takes on such a peer."""
        if self.recomputes(first, end, in_flight, offered_bytes):
            return _used_bytes(self.again, first, end, in_flight) + self.once_bytes
        return _used_bytes(self.layers, first, end, in_flight)


@lru_cache(maxsize=8)
def stage_memory(workload: Workload) -> StageMemory:
    """The memory of a run's stages without sums, which `StageMemory.of` adds."""
    layers = layer_sizes(workload)
    again, once_bytes = (_unlike_again if layers.unlike else _alike_again)(layers, workload)
    is_lossy = workload.gradient_bytes_per_kibi < FLOAT_BYTES * KIBI
    sums = SHARED_SUMS + (OWED_SUMS if is_lossy else 0)
    return StageMemory(layers, again, once_bytes, workload.recompute, sums)


def _used_bytes(layers: LayerTable, first: int, end: int, in_flight: int) -> int:
    return layers.state_bytes(first, end) + in_flight * layers.saved_bytes(first, end)


def _alike_again(layers: LayerTable, workload: Workload) -> tuple[LayerTable, int]:
    """What each layer keeps where stages recompute, and the bytes that a stage needs once."""
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
    """The same where layers are unlike: each saves, and is entered with, its own. The most that any
    layer saves counts once."""
    boundaries = workload.unlike.boundary_bytes if workload.unlike is not None else ()
    once = max(layer.saved_bytes for layer in layers.unlike)
    kept = tuple(
        replace(layer, saved_bytes=min(layer.saved_bytes, entry_bytes))
        for layer, entry_bytes in zip(layers.unlike, (boundaries[0], *boundaries), strict=True)
    )
    return replace(layers, unlike=kept), once
