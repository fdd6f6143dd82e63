"""Which lost nodes of the directory are called again, and when."""

from collections.abc import Iterable

FIRST_PAUSE_S = 15.0
PAUSE_LIMIT_S = 300.0
"""The longest pause before a lost node is called again. If it is gone for good, another machine may
have its address by now."""


class LostNodes:
    """Lost nodes, each called after a pause that doubles. For a node that was back, the pause
    begins anew."""

    def __init__(self) -> None:
        self._pauses: dict[str, tuple[float, float]] = {}
        """For each node: until when its pause lasts, and how long the pause is."""

    def due(self, absent: Iterable[str], now_s: float) -> list[str]:
        """The absent nodes that are to be called now. Their call is noted."""
        ids = list(absent)
        self._pauses = {it: self._pauses[it] for it in ids if it in self._pauses}
        due = [it for it in ids if it not in self._pauses or now_s >= self._pauses[it][0]]
        for it in due:
            before_s = self._pauses[it][1] if it in self._pauses else FIRST_PAUSE_S / 2
            pause_s = min(PAUSE_LIMIT_S, 2 * before_s)
            self._pauses[it] = now_s + pause_s, pause_s
        return due
