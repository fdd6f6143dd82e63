"""What a work that is computed again here waits for: others say so in no message of their own, and
who is waited for by an auditor would have that one taken for who stands still."""

import contextlib
from collections import Counter
from collections.abc import Iterator

from p2p_dtfm.core.messages.work import Lack


class AskedTensors:
    """Parts of others' gradients and frames that they have sent, as they have claimed them, and of
    whom each is due."""

    def __init__(self) -> None:
        self._due: Counter[Lack] = Counter()

    @property
    def lacks(self) -> tuple[Lack, ...]:
        return tuple(sorted(self._due))

    @contextlib.contextmanager
    def waiting(self, due: Lack) -> Iterator[None]:
        """For one that another than who computes the work again was owed in the step."""
        self._due[due] += 1
        try:
            yield
        finally:
            self._due[due] -= 1
            self._due += Counter()
