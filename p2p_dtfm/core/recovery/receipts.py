"""What a holder knows of the guardians of its layers: who is in place, and what it has received."""

from collections import Counter
from collections.abc import Iterable, Mapping

from p2p_dtfm.core.protocol.snapshot import ViewId

GIVEN_UP_LIMIT = 3
"""How often in a view a guardian is given up. After that its receipts no longer count."""


class Receipts:
    """A holder says Prepared for a step once the guardians in place have its reduced gradients.

    A guardian is in place from its first receipt in this view on. Those that had to have the states
    by the first step are in place from that step on (`guardians.guarded_at_once`). Nobody waits for
    any other guardian before its first receipt, so that the transfer of states does not hold up a
    view after a failure.
    """

    def __init__(self, view: ViewId, guards: Mapping[int, str], at_once: Iterable[int]) -> None:
        """`guards`: the guardian of each layer of which this peer is the only holder."""
        self.view = view
        self._guards = guards
        self._received = {layer: -1 for layer in guards if layer in set(at_once)}
        """By layer whose guardian is in place, the last step received; -1 for none."""
        self._given_up: Counter[str] = Counter()
        self._unsure = set(self._received)
        """Layers in `_received` whose guardian has not said that it has the present state."""

    def receipt(self, sender: str, view: ViewId, step: int, layers: tuple[int, ...]) -> None:
        """`sender` has the states of `layers` at `step` and the reduced gradients of `step`."""
        for layer in layers if view == self.view else ():
            if self._guards.get(layer) == sender and self._given_up[sender] < GIVEN_UP_LIMIT:
                self._received[layer] = max(step, self._received.get(layer, -1))
                self._unsure.discard(layer)

    def begins_again(self, guardian: str) -> None:
        """The guardian asks for states anew."""
        self._unsure |= {n for n in self._received if self._guards[n] == guardian}

    def received_all_of(self, guardian: str) -> bool:
        """Whether every layer that this guardian guards here has a receipt."""
        return all(
            self._received.get(layer, -1) >= 0 and layer not in self._unsure
            for layer, of in self._guards.items()
            if of == guardian
        )

    def waits_for(self, step: int) -> tuple[int, ...]:
        """Layers whose guardian is in place but has no reduced gradient of `step` yet.

        While there are any, Prepared for `step` must not be said.
        """
        return tuple(sorted(layer for layer, last in self._received.items() if last < step))

    def are_of_all(self, step: int | None) -> bool:
        """Whether the guardian of each layer is in place and has given its receipt for `step`. With
        None, being in place is enough: a step without gradients gets no receipts."""
        if self._guards.keys() != self._received.keys():
            return False
        return step is None or not self.waits_for(step)

    def owed(self, step: int) -> tuple[str, ...]:
        """Guardians that owe a receipt for `step`, also those that begin again. A holder that waits
        for one and does not say so would itself seem to stand still."""
        return tuple(sorted({self._guards[layer] for layer in self.waits_for(step)}))

    def give_up(self, step: int) -> tuple[str, ...]:
        """Wait no more for guardians that do not yet have the states of `step`, until their next
        receipt. Returns their ids."""
        late = {layer for layer in self.waits_for(step) if layer in self._unsure}
        for layer in late:
            del self._received[layer]
        self._unsure -= late
        found = {self._guards[layer] for layer in late}
        self._given_up.update(found)
        return tuple(sorted(found))
