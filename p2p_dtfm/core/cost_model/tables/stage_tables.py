"""A cache of the times of stages: a search asks for the same few again and again.

A peer and the first and end of its layers name a stage. So a small model has few stages, and the
times of each are worked out once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from p2p_dtfm.core.cost_model.tables.layer_tables import LayerNs, LayerTable, kinds_in

KNOWN_LIMIT = 1 << 16
Cuts = tuple[int, ...]
Fill = Callable[[int], Cuts | None]
"""`fill(budget_ns)` gives each stage in turn as many layers as the budget and its memory allow.
Each leaves at least one for each later stage, so a cut is found whenever this order has one."""


class StageNs(NamedTuple):
    """Times of one microbatch at some layers of a peer."""

    forward: int
    backward: int
    last_part: int
    """The part in which the gradients become final."""
    last_part_of_split: int
    """The same where the stage splits its backwards."""


class StageTable:
    """The times of stages of all peers of a problem."""

    def __init__(self, layer_ns: Sequence[LayerNs], layer_count: int) -> None:
        self._layer_ns = layer_ns
        self._layer_count = layer_count
        self._known: dict[tuple[int, int, int], StageNs] = {}

    def of(self, peer: int, first: int, end: int) -> StageNs:
        """The times of a peer for the layers `first .. end - 1`."""
        found = self._known.get((peer, first, end))
        if found is None:
            if len(self._known) >= KNOWN_LIMIT:
                self._known.clear()
            times, kinds = self._layer_ns[peer], kinds_in(first, end, self._layer_count)
            found = self._known[peer, first, end] = StageNs(
                times.forward_ns(kinds),
                times.backward_ns(kinds),
                times.last_part_ns(kinds, False),
                times.last_part_ns(kinds, True),
            )
        return found


class StageNeeds(NamedTuple):
    """Times and memory of a stage whose layers are not chosen yet."""

    times: LayerNs
    memory_bytes: int
    kept: int
    """Microbatches for which the stage keeps what each layer saves."""
    layers: LayerTable
    """What layers take at its peer."""


def fill_by(stages: Sequence[StageNeeds]) -> Fill:
    """The function that fills these stages within a time."""
    return _fill_unlike(stages) if stages[0].layers.unlike else _fill_alike(stages)


def _nothing_fits(budget_ns: int) -> Cuts | None:
    return None


def _fill_alike(stages: Sequence[StageNeeds]) -> Fill:
    last, count = len(stages) - 1, stages[0].layers.count
    rows = []
    for position, (times, left_bytes, kept, layers) in enumerate(stages):
        taken_ns = 0
        if position == 0:
            taken_ns += times.embedding_ns
            left_bytes -= layers.embedding.state_bytes + kept * layers.embedding.saved_bytes
        if position == last:
            taken_ns += times.head_ns
            left_bytes -= layers.head.state_bytes + kept * layers.head.saved_bytes
        if left_bytes < 0:
            return _nothing_fits
        blocks = left_bytes // (layers.block.state_bytes + kept * layers.block.saved_bytes)
        end = count - max(1, last - position)
        rows.append((taken_ns, times.block_ns, blocks, end, position == last))

    def fill(budget_ns: int) -> Cuts | None:
        cuts, layer, before = [0], 1, 0
        for taken_ns, block_ns, blocks, end, is_last in rows:
            left_ns = budget_ns - taken_ns
            if left_ns < 0:
                return None
            more = left_ns // block_ns
            layer += more if more < blocks else blocks
            if layer > end:
                layer = end
            if is_last:
                layer += 1
            if layer == before:
                return None
            cuts.append(layer)
            before = layer
        return tuple(cuts) if layer == count else None

    return fill


def _fill_unlike(stages: Sequence[StageNeeds]) -> Fill:
    count = stages[0].layers.count
    rows = []
    for position, (times, room_bytes, kept, layers) in enumerate(stages):
        kinds = [kinds_in(layer, layer + 1, count) for layer in range(count)]
        each_ns = [times.forward_ns(each) + times.backward_ns(each) for each in kinds]
        each_bytes = [size.state_bytes + kept * size.saved_bytes for size in layers.unlike]
        rows.append((room_bytes, each_ns, each_bytes, count - (len(stages) - 1 - position)))

    def fill(budget_ns: int) -> Cuts | None:
        cuts, layer = [0], 0
        for left_bytes, each_ns, each_bytes, end in rows:
            left_ns = budget_ns
            while layer < end:
                left_ns -= each_ns[layer]
                left_bytes -= each_bytes[layer]
                if left_ns < 0 or left_bytes < 0:
                    break
                layer += 1
            if layer == cuts[-1]:
                return None
            cuts.append(layer)
        return tuple(cuts) if layer == count else None

    return fill
