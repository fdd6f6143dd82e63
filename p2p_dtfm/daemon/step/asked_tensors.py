"""The tensors that a recomputation on this peer waits for. No other message names them. If this
peer did not say whom it waits for, that member could have this auditor taken for the one that
stands still."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from p2p_dtfm.core.messages.work import Lack


class AskedTensors:
    """Parts of others' gradients, and frames that others have sent, as their senders claimed them;
    each with the peer that owes it."""

    def __init__(self) -> None:
        self._due: Counter[Lack] = Counter()

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return tuple(sorted(self._due))

    @contextlib.contextmanager
    def waiting(self, due: Lack) -> Iterator[None]:
        """While this peer waits for a tensor that was owed, in the step, to another member than the
        one that computes the work again."""
        self._due[due] += 1
        try:
            yield
        finally:
            self._due[due] -= 1
            self._due += Counter()
