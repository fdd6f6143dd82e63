"""The lineage of a state: which steps made it, in which view each was committed, and to what.

A lineage is named by its length, which is the version of the state, and by a digest. Two states are
the same exactly when both are equal. A step redone in another view after a failure is another
lineage, even though it has the same result. So is a step of which a peer was told another outcome.

Where a run takes back what a convicted liar has done (`[audit] undo_steps`), it goes back to an
earlier state and begins an *epoch*. Names then begin with the number of epochs, and the steps from
which the last of them went on: `2:40,24:<digest>`. So the name alone shows whether a state was
taken back: it is of an earlier epoch, and longer than the state that a later one began with. A run
in which nothing was taken back has plain digests.
"""

import re
from functools import lru_cache
from typing import NamedTuple

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.snapshot import ViewId

GENESIS_LINEAGE = ""
"""The lineage of the initial parameters, which anyone can compute from the run spec."""

REMEMBERED_STEPS = 1024
NAME_LIMIT = 256
"""Characters of a name: a digest, and before it what `STARTS_REMEMBERED` epochs take."""
STARTS_REMEMBERED = 8
"""Starts of epochs in a name. Of states older than so many epochs, only the initial parameters
count."""
_MARKED = re.compile(r"([1-9][0-9]{0,8}):((?:[0-9]{1,15},){0,7}[0-9]{1,15}):(.*)", re.DOTALL)
_DIGEST = re.compile(r"[0-9a-f]{64}")


class Epochs(NamedTuple):
    """How often what was committed has been taken back, and the step from which each of the last
    epochs went on."""

    number: int = 0
    starts: tuple[int, ...] = ()

    def next_one(self, step: int) -> "Epochs":
        """These epochs and one more, which goes on from `step`."""
        return Epochs(self.number + 1, (*self.starts, step)[-STARTS_REMEMBERED:])


def epochs_of(lineage: str) -> Epochs:
    """The epochs in a lineage's name. A text longer than any name has none, and is not cached."""
    return _epochs_of(lineage) if len(lineage) <= NAME_LIMIT else Epochs()


@lru_cache(maxsize=4096)
def _epochs_of(lineage: str) -> Epochs:
    found = _MARKED.fullmatch(lineage)
    if found is None:
        return Epochs()
    return Epochs(int(found[1]), tuple(int(step) for step in found[2].split(",")))


def unmarked(lineage: str) -> str:
    """The digest alone, which is the same in whatever epoch the state is named."""
    found = _MARKED.fullmatch(lineage)
    return lineage if found is None else found[3]


def marked(lineage: str, epochs: Epochs) -> str:
    """The same state, named in these epochs."""
    bare = unmarked(lineage)
    if not epochs.number:
        return bare
    return f"{epochs.number}:{','.join(map(str, epochs.starts))}:{bare}"


def is_lineage(text: str) -> bool:
    """Whether the text is a lineage's name, and so no path to anywhere else."""
    bare = unmarked(text)
    return bare == GENESIS_LINEAGE or _DIGEST.fullmatch(bare) is not None


def is_undone(version: int, lineage: str, epochs: Epochs) -> bool:
    """Whether a state was taken back, where training has come to `epochs`."""
    return is_undone_of(version, epochs_of(lineage).number, epochs)


def is_undone_of(version: int, number: int, epochs: Epochs) -> bool:
    """Whether a state that was made in the epoch `number` was taken back."""
    behind = epochs.number - number
    if behind <= 0:
        return False
    if behind > len(epochs.starts):
        return version > 0
    return version > min(epochs.starts[-behind:])


def named_in(version: int, lineage: str, epochs: Epochs) -> str:
    """The name of a state that was not taken back. The state from which the last epoch went on is
    named in that epoch; all others keep their name."""
    is_start = bool(epochs.starts) and version == epochs.starts[-1]
    is_older = epochs_of(lineage).number < epochs.number
    return marked(lineage, epochs) if is_start and is_older else lineage


def extend(lineage: str, step: int, view: ViewId, outcome_digest: str = "") -> str:
    """The lineage after `step` is committed in `view`, with the outcome of this digest
    (`StepOutcome.digest`)."""
    return marked(digest((lineage, step, view, outcome_digest)), epochs_of(lineage))


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
        return self._digests.get(length, GENESIS_LINEAGE if length == 0 else None)

    def committed(self, step: int, lineage: str) -> None:
        """Go on by one step, to `lineage`."""
        assert step == self.length, (step, self.length)
        self._digests[step + 1] = lineage
        self._digests.pop(step - REMEMBERED_STEPS, None)
        self.length = step + 1

    def move_to(self, length: int, lineage: str) -> None:
        """Go on from `lineage`, which may be longer, shorter or foreign."""
        if self._digests.get(length) == lineage:
            self._digests = {n: d for n, d in self._digests.items() if n <= length}
        else:
            self._digests = {length: lineage}
        self.length = length
