"""What a replica remembers from step to step for itself. It is no part of the state that peers
share.

It is not hashed, sent, saved or agreed on. Losing it costs a little progress and no agreement, but
using it twice for one step would be wrong. So it is a transaction of its own: a step proposes new
memory, which counts only once the step is committed.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

Memory = TypeVar("Memory")


class PrivateMemory(Generic[Memory]):
    """One value for each layer."""

    def __init__(self) -> None:
        self._held: dict[int, Memory] = {}
        self._proposed: dict[int, Memory] = {}
        self._step: int | None = None

    def of(self, layer: int) -> Memory | None:
        """The memory of a layer as of the last committed step, whatever has been proposed since."""
        return self._held.get(layer)

    def propose(self, step: int, values: Mapping[int, Memory]) -> None:
        """What to remember of these layers if `step` commits. A new attempt at a step forgets what
        the last attempt proposed."""
        if self._step != step:
            self.discard()
        self._step = step
        self._proposed.update(values)

    def commit(self, step: int) -> None:
        """`step` is committed: what was proposed for it, if anything, counts now."""
        if self._step == step:
            self._held.update(self._proposed)
        self.discard()

    def discard(self) -> None:
        """The attempt at a step is given up."""
        self._proposed = {}
        self._step = None

    def keep_only(self, layers: Iterable[int]) -> None:
        """Keep the memory of these layers only: a view has begun in which this peer holds them."""
        kept = set(layers)
        self._held = {layer: value for layer, value in self._held.items() if layer in kept}
        self.discard()

    def forget(self, layers: Iterable[int]) -> None:
        """The shared state of these layers was fetched or loaded: it did not come out of this
        memory's steps."""
        gone = set(layers)
        self._held = {layer: value for layer, value in self._held.items() if layer not in gone}
        if not gone.isdisjoint(self._proposed):  # else a step may be proposing in another thread
            self._proposed = {n: value for n, value in self._proposed.items() if n not in gone}
