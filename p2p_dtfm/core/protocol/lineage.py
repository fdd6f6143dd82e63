"""The lineage of a state: which steps made it, in which view each was committed, and to what.

Named by its length, which is the version of the state, and a digest. Two states are the same
exactly when both are equal: a step redone in another view after a failure is another lineage, even
though it has the same result; and so is a step of which somebody was told another outcome.
"""

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.snapshot import ViewId

GENESIS_LINEAGE = ""
"""Of the initial parameters, which anyone can compute from the run spec."""

REMEMBERED_STEPS = 1024


def extend(lineage: str, step: int, view: ViewId, outcome_digest: str = "") -> str:
    """The lineage after `step` is committed in `view`; `StepOutcome.digest` says to what."""
    return digest((lineage, step, view, outcome_digest))


class Lineage:
    """The recent part of one peer's lineage."""

    def __init__(self) -> None:
        self.length = 0
        self._digests = {0: GENESIS_LINEAGE}

    @property
    def digest(self) -> str:
        return self._digests[self.length]

    def at(self, length: int) -> str | None:
        """The digest when the lineage was that long; None if it is not remembered."""
        return GENESIS_LINEAGE if length == 0 else self._digests.get(length)

    def committed(self, step: int, lineage: str) -> None:
        """One step more."""
        assert step == self.length, (step, self.length)
        self._digests[step + 1] = lineage
        self._digests.pop(step - REMEMBERED_STEPS, None)
        self.length = step + 1

    def move_to(self, length: int, lineage: str) -> None:
        """Go on from here, which may be a longer, shorter or foreign lineage."""
        if self._digests.get(length) == lineage:
            self._digests = {n: d for n, d in self._digests.items() if n <= length}
        else:
            self._digests = {length: lineage}
        self.length = length
