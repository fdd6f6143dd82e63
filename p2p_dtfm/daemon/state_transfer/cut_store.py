"""Copies of layers' states as of earlier steps, in main memory: this peer's part of cuts."""

from collections.abc import Callable, Iterable, Mapping

from p2p_dtfm.core.cost_model.cuts import cuts_that_stay
from p2p_dtfm.core.messages.agreement_messages import SavedState
from p2p_dtfm.core.protocol.lineage import unmarked
from p2p_dtfm.train.model.layer_state import LayerSnapshot

CutKey = tuple[int, str]
"""Step and lineage."""


class CutStore:
    """`on_change` is told what is here whenever that changes."""

    def __init__(self, on_change: Callable[[tuple[SavedState, ...]], None]) -> None:
        self._on_change = on_change
        self._cuts: dict[CutKey, dict[int, LayerSnapshot]] = {}
        self._safe = 0
        """Step of the newest whole cut; older ones are dropped."""
        self._told: tuple[SavedState, ...] = ()

    def put(self, lineage: str, copies: Iterable[LayerSnapshot]) -> None:
        for copy in copies:
            self._cuts.setdefault((copy.version, lineage), {})[copy.layer] = copy
        self._keep(self._cuts)
        self._tell()

    def find(self, layer: int, step: int, lineage: str) -> LayerSnapshot | None:
        return self.layers(step, lineage).get(layer)

    def layers(self, step: int, lineage: str) -> Mapping[int, LayerSnapshot]:
        """What is here of one cut."""
        return self._cuts.get((step, lineage), {})

    def name_anew(self, step: int, lineage: str) -> None:
        """Training goes on from `step` of this lineage. Where that begins an epoch, the same states
        have another name from now on."""
        for key in [key for key in self._cuts if key[0] == step and key[1] != lineage]:
            if unmarked(key[1]) == unmarked(lineage):
                before = self._cuts.pop(key)
                self._cuts[step, lineage] = before | self._cuts.get((step, lineage), {})

    def keep_from(self, safe: int, is_on_lineage: Callable[[int, str], bool]) -> None:
        """Drop what is older than the newest whole cut, or of another lineage."""
        self._safe = safe
        self._keep(key for key in self._cuts if is_on_lineage(*key))
        self._tell()

    def _keep(self, keys: Iterable[CutKey]) -> None:
        """Each layer is looked at by itself: a holder that sends copies of more steps than are cut
        has its own older ones dropped, and no other holder's."""
        held = set(keys)
        steps: dict[int, set[int]] = {}
        for key in held & self._cuts.keys():
            for layer in self._cuts[key]:
                steps.setdefault(layer, set()).add(key[0])
        stay = {layer: cuts_that_stay(of_layer, self._safe) for layer, of_layer in steps.items()}
        kept = {
            key: {layer: copy for layer, copy in cut.items() if key[0] in stay[layer]}
            for key, cut in self._cuts.items()
            if key in held
        }
        self._cuts = {key: cut for key, cut in kept.items() if cut}

    def clear(self) -> None:
        self._cuts, self._safe = {}, 0
        self._tell()

    def _tell(self) -> None:
        found = tuple(
            SavedState(step, lineage, tuple(sorted(cut)))
            for (step, lineage), cut in sorted(self._cuts.items())
        )
        if found != self._told:
            self._told = found
            self._on_change(found)
