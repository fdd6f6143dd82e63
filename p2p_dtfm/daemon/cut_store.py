"""Copies of layers' states as of earlier steps, in main memory: this peer's part of cuts."""

from collections.abc import Callable, Iterable

from p2p_dtfm.core.agreement_messages import SavedState
from p2p_dtfm.core.cuts import cuts_that_stay
from p2p_dtfm.train.layer_state import LayerSnapshot

CutKey = tuple[int, str]
"""Step and lineage."""


class CutStore:
    """`on_change` hears of what is here whenever that is something else."""

    def __init__(self, on_change: Callable[[tuple[SavedState, ...]], None]) -> None:
        self._on_change = on_change
        self._cuts: dict[CutKey, dict[int, LayerSnapshot]] = {}

    def put(self, lineage: str, copies: Iterable[LayerSnapshot]) -> None:
        for copy in copies:
            self._cuts.setdefault((copy.version, lineage), {})[copy.layer] = copy
        self._tell()

    def find(self, layer: int, step: int, lineage: str) -> LayerSnapshot | None:
        return self._cuts.get((step, lineage), {}).get(layer)

    def layers(self, step: int, lineage: str) -> frozenset[int]:
        return frozenset(self._cuts.get((step, lineage), {}))

    @property
    def size_bytes(self) -> int:
        copies = (copy for cut in self._cuts.values() for copy in cut.values())
        return sum(part.nbytes for copy in copies for part in copy.parts)

    def keep_from(self, safe: int, is_on_lineage: Callable[[int, str], bool]) -> None:
        """Drop what is older than the newest whole cut, or of another lineage."""
        held = [(step, of) for step, of in self._cuts if is_on_lineage(step, of)]
        stay = cuts_that_stay((step for step, _ in held), safe)
        kept = {key: self._cuts[key] for key in held if key[0] in stay}
        if kept.keys() != self._cuts.keys():
            self._cuts = kept
            self._tell()

    def clear(self) -> None:
        if self._cuts:
            self._cuts = {}
            self._tell()

    def _tell(self) -> None:
        self._on_change(
            tuple(
                SavedState(step, lineage, tuple(sorted(cut)))
                for (step, lineage), cut in sorted(self._cuts.items())
            )
        )
