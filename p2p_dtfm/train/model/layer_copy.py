"""A copy of a layer's state in pieces, and put together again.

Pieces are numbered through the parameters, then the first moments, then the second moments.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.train.model.layer_state import LayerSnapshot, snapshot_from

PIECE_ELEMENTS = 1 << 15
"""Elements of a piece: few, so that pieces spread evenly over time and hold up nothing."""
_PARTS = 3


def pieces_of(copy: LayerSnapshot) -> Iterator[Tensor]:
    """All pieces of a copy, in order: views, no copies."""
    for part in copy.parts:
        yield from part.split(PIECE_ELEMENTS)


class PartialCopy:
    """A layer's copy on its way here."""

    def __init__(self, layer: int, step: int, parameter_count: int) -> None:
        self.layer = layer
        self.step = step
        self._parts = torch.empty(_PARTS, parameter_count)
        self._of_part = -(-parameter_count // PIECE_ELEMENTS)
        self._missing = set(range(_PARTS * self._of_part))
        self.last_index = len(self._missing) - 1

    @property
    def is_whole(self) -> bool:
        return not self._missing

    def length(self, index: int) -> int:
        """Elements of a piece; 0 for a piece that does not exist."""
        if not 0 <= index <= self.last_index:
            return 0
        start = index % self._of_part * PIECE_ELEMENTS
        return min(PIECE_ELEMENTS, self._parts.shape[1] - start)

    def take(self, index: int, piece: Tensor) -> bool:
        """Take a piece of `length(index)` elements; whether it is new. What came first counts."""
        if index not in self._missing:
            return False
        part, at = divmod(index, self._of_part)
        start = at * PIECE_ELEMENTS
        self._parts[part, start : start + self.length(index)] = piece
        self._missing.discard(index)
        return True

    def snapshot(self, spec: RunSpec) -> LayerSnapshot:
        """The whole copy, once all pieces are there."""
        assert self.is_whole
        return snapshot_from(spec, self.layer, self.step, self._parts)
