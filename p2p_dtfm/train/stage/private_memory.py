"""What a replica remembers from step to step for itself. It is no part of the state that peers
share.

It is not hashed, sent, saved or agreed on. Losing it costs a little progress and no agreement, but
using it twice for one step would be wrong. So it is a transaction of its own: an attempt at a step
proposes new memory, which counts only once the step is committed as that attempt has it.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, TypeVar

Memory = TypeVar("Memory")


class PrivateMemory(Generic[Memory]):
    """One value for each layer."""

    def __init__(self) -> None:
        self._held: dict[int, Memory] = {}
        self._proposed: dict[int, Memory] = {}
        self._view: Hashable = None
        self._attempt: tuple[Hashable, int] | None = None
        """The view and the step of what is proposed."""

    def of(self, layer: int) -> Memory | None:
        """The memory of a layer as of the last committed step, whatever has been proposed since."""
        return self._held.get(layer)

    def begin(self, view: Hashable) -> None:
        """A step is attempted in this view. What an earlier attempt has proposed stays until this
        one proposes: somebody may have committed the step as it was then."""
        self._view = view

    def propose(self, step: int, values: Mapping[int, Memory]) -> None:
        """What to remember of these layers if this attempt at `step` commits. What another attempt
        proposed is forgotten."""
        if self._attempt != (self._view, step):
            self.discard()
        self._attempt = self._view, step
        self._proposed.update(values)

    def commit(self, step: int, view: Hashable = None) -> bool:
        """`step` is committed as it was computed in `view`: what was proposed there counts now.
        Returns whether anything was."""
        is_known = self._attempt == (view, step)
        if is_known:
            self._held.update(self._proposed)
        self.discard()
        return is_known

    def discard(self) -> None:
        """What is proposed will not count."""
        self._proposed = {}
        self._attempt = None

    def keep_only(self, layers: Iterable[int]) -> None:
        """Keep the memory of these layers only: a view has begun in which this peer holds them."""
        kept = set(layers)
        self._held = {layer: value for layer, value in self._held.items() if layer in kept}
        self._proposed = {n: value for n, value in self._proposed.items() if n in kept}

    def forget(self, layers: Iterable[int]) -> None:
        """The shared state of these layers was fetched or loaded: it did not come out of this
        memory's steps."""
        gone = set(layers)
        self._held = {layer: value for layer, value in self._held.items() if layer not in gone}
        if not gone.isdisjoint(self._proposed):  # else a step may be proposing in another thread
            self._proposed = {n: value for n, value in self._proposed.items() if n not in gone}
