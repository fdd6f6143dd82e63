"""What was made of layers' states, for as long as these stay what they are."""

import weakref
from typing import Generic, TypeVar

from p2p_dtfm.train.model.layer_state import LayerState

Made = TypeVar("Made")


class MadeOfStates(Generic[Made]):
    """The latest of each layer. To write or to hash a state costs the more the larger it is, and to
    ask for that costs nothing. This keeps no state alive."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[LayerState], int, Made]] = {}

    def get(self, state: LayerState) -> Made | None:
        """What was made of this very state at the version that it has."""
        of, version, made = self._made.get(state.layer, (None, -1, None))
        is_same = of is not None and of() is state and version == state.version
        return made if is_same else None

    def put(self, state: LayerState, version: int, made: Made) -> list[Made]:
        """Returns what this takes the place of."""
        before = self._made.pop(state.layer, None)
        self._made[state.layer] = weakref.ref(state), version, made
        return [] if before is None else [before[2]]

    def all(self) -> list[Made]:
        return [made for _, _, made in self._made.values()]

    def clear(self) -> list[Made]:
        """Returns what there was."""
        before, self._made = self.all(), {}
        return before
