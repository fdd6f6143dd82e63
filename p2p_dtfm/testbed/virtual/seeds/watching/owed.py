"""Whether a replica goes on with what it has kept to itself: its debts to sums, and inner moments.

All members have the same without it, only worse: what a sum has left out is lost for good. Nothing
that they could compare shows that.
"""

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from p2p_dtfm.testbed.virtual.patches import Patches
from p2p_dtfm.testbed.virtual.process import PROCESS
from p2p_dtfm.train.stage.local_steps import LocalSteps
from p2p_dtfm.train.stage.private_memory import PrivateMemory
from p2p_dtfm.train.stage.replica_memory import ReplicaMemory

Memory = PrivateMemory[Any]
Proposed = dict[int, tuple[int, object]]
"""What was proposed, by layer: for which step, and what."""


class Owed:
    """Watches one seed. What a replica proposed in the step that led to a layer's state is what it
    goes on with, unless that state has come from elsewhere."""

    def __init__(self) -> None:
        self._proposed: weakref.WeakKeyDictionary[Memory, Proposed] = weakref.WeakKeyDictionary()
        self._problem = ""

    def look(self, now_s: float) -> str:
        """Who has forgotten something; empty, if nobody has."""
        return self._problem

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        patches = Patches()

        def propose(memory: Memory, step: int, values: Mapping[int, Any]) -> None:
            proposed = self._proposed.setdefault(memory, {})
            proposed.update({layer: (step, value) for layer, value in values.items()})
            proposes(memory, step, values)

        def owed_of(memory: ReplicaMemory, states: Collection[Any]) -> Any:
            for state in states:
                self._require(memory.owed, state.layer, state.version)
            return owes(memory, states)

        def begin(steps: LocalSteps, step: int) -> None:
            for layer in steps._states:
                self._require(steps._memory, layer, step)
            begins(steps, step)

        proposes = patches.put(PrivateMemory, "propose", propose)
        owes = patches.put(ReplicaMemory, "owed_of", owed_of)
        begins = patches.put(LocalSteps, "begin", begin)
        self._forget_with(patches, "keep_only", lambda layer, kept: layer not in kept)
        self._forget_with(patches, "forget", lambda layer, gone: layer in gone)
        try:
            yield
        finally:
            patches.undo()

    def _forget_with(
        self, patches: Patches, name: str, is_gone: Callable[[int, set[int]], bool]
    ) -> None:
        """Notes what the memory forgets by itself."""

        def forgets(memory: Memory, layers: Iterable[int]) -> None:
            named, proposed = set(layers), self._proposed.get(memory, {})
            for layer in [it for it in proposed if is_gone(it, named)]:
                del proposed[layer]
            right(memory, named)

        right = patches.put(PrivateMemory, name, forgets)

    def _require(self, memory: Memory, layer: int, step: int) -> None:
        """The layer's value is still there as `step` is computed, with states that the step before
        made."""
        of_step, value = self._proposed.get(memory, {}).get(layer, (None, None))
        process = PROCESS.get()
        if self._problem or of_step != step - 1 or memory.of(layer) is value or process is None:
            return
        self._problem = (
            f"{process.name} does not go on in step {step} with what it has kept of layer {layer} "
            "in the one before"
        )
