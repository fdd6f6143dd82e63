"""All that a replica keeps for itself: what it owes to reductions, and its inner moments."""

from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import Tensor

from p2p_dtfm.train.model.layer_state import LayerState
from p2p_dtfm.train.stage.local_steps import InnerMoments
from p2p_dtfm.train.stage.private_memory import PrivateMemory


class ReplicaMemory:
    """See `private_memory`: proposed by a step, kept only if it commits.

    In a new view a peer keeps what it remembers of the layers that it still holds. It owes the same
    whoever sums, and the moments are its own. Of other layers it forgets all.
    """

    def __init__(self) -> None:
        self.owed: PrivateMemory[Tensor] = PrivateMemory()
        """Flat fp32, in the layout of a layer's gradient."""
        self.moments: PrivateMemory[InnerMoments] = PrivateMemory()
        self._committed: tuple[Hashable, int] | None = None

    def begin(self, view: Hashable) -> None:
        """A step is attempted in this view."""
        self.owed.begin(view)
        self.moments.begin(view)

    def owed_of(self, states: Sequence[LayerState]) -> Tensor | None:
        """What is owed of a segment's layers, one after the other, on the CPU; None if nothing
        is."""
        held = [self.owed.of(state.layer) for state in states]
        if all(owed is None for owed in held):
            return None
        return torch.cat(
            [
                torch.zeros(state.parameter_count) if owed is None else owed
                for state, owed in zip(states, held, strict=True)
            ]
        )

    def propose_owed(self, step: int, states: Sequence[LayerState], owed: Tensor) -> None:
        """Propose what will be owed of these layers, one after the other."""
        parts = owed.split([state.parameter_count for state in states])
        self.owed.propose(
            step, {state.layer: part for state, part in zip(states, parts, strict=True)}
        )

    def commit(self, step: int, view: Hashable = None) -> None:
        """`step` is committed as it was computed in `view`. Told once more, as where others are
        rolled forward to it, it changes nothing.

        What was owed before is part of the step. So if it is not known what the step left out
        instead, nothing is owed: else the same would be added twice.
        """
        if self._committed == (view, step):
            return
        self._committed = view, step
        self.moments.commit(step, view)
        if not self.owed.commit(step, view):
            self.owed.keep_only(())

    def keep_only(self, layers: Iterable[int]) -> None:
        """Keep what belongs to these layers: a view begins in which this peer holds them."""
        kept = set(layers)
        self.owed.keep_only(kept)
        self.moments.keep_only(kept)

    def forget(self, layers: Iterable[int]) -> None:
        """Forget what belongs to these layers: their states come from elsewhere."""
        gone = set(layers)
        self.owed.forget(gone)
        self.moments.forget(gone)
