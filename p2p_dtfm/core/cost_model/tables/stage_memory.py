"""Memory that a stage takes of what its peer offers: one rule for plans, views and simulated steps.

Beside the state of its layers (parameters, gradient, two moments) lies what gradients come to. Of a
stage that nobody shares, as in a plan of one pipeline, that is a copy, kept until it is applied.
Where replicas share it, as all stages of a plan of several pipelines, it is the sums, and what has
come of the others' parts: half as much as a gradient from one other, nearly as much from many (more
is with a member that makes all sums of many: docs/assumptions.md). An accelerator's are in its
host's memory, and a scenario's devices are taken to be such.

A stage that recomputes keeps only the inputs of its layers, and what one layer saves while it goes
back through that: the wider of the two kinds counts, the head's where it is held.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from p2p_dtfm.core.cost_model.tables.layer_tables import LayerTable, layer_sizes
from p2p_dtfm.core.protocol.records import PROCESSOR
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, KIBI, Workload

LONE_SUMS = 1
"""Of each gradient, beside it, at who alone holds the layer."""
SHARED_SUMS = 2
OWED_SUMS = 1
"""Where a reduction is lossy: what is owed lies there once more while it goes on."""


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
    shared_sums: int = SHARED_SUMS

    def of(self, kind: str, pipeline_count: int) -> "StageMemory":
        """On a device of this kind, with the sums of a plan of so many pipelines."""
        if kind != PROCESSOR:
            return self
        return self.shared if pipeline_count > 1 else self.alone

    @cached_property
    def alone(self) -> "StageMemory":
        """On a processor, in a plan of one pipeline."""
        return self._beside(LONE_SUMS)

    @cached_property
    def shared(self) -> "StageMemory":
        """The same in one of several."""
        return self._beside(self.shared_sums)

    def _beside(self, sums: int) -> "StageMemory":
        return replace(self, layers=self.layers.with_sums(sums), again=self.again.with_sums(sums))

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
    """Of a run, without sums: `of` says what lies beside."""
    layers = layer_sizes(workload)
    again, once_bytes = (_unlike_again if layers.unlike else _alike_again)(layers, workload)
    is_lossy = workload.gradient_bytes_per_kibi < FLOAT_BYTES * KIBI
    sums = SHARED_SUMS + (OWED_SUMS if is_lossy else 0)
    return StageMemory(layers, again, once_bytes, workload.recompute, sums)


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
