"""Prepared of a peer that computes alone, which others may hear of a little later.

Nobody waits for them. Each message costs both ends and their p2pd more than a millisecond of
processor. Three spares that hear of six steps a second take a tenth of a core from the member that
computes.
"""

from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId

TOLD_EVERY_S = 0.5
LIMIT = 16
"""Limit of statements in one message."""


class HeldBack:
    """Statements of one view that the others have not been told."""

    def __init__(self) -> None:
        self._view: ViewId | None = None
        self._signed: list[Signed] = []
        self._told_s = 0.0

    def add(self, view: ViewId, signed: Signed) -> None:
        if view != self._view:
            self._view, self._signed = view, []
        self._signed.append(signed)

    def is_due(self, now_s: float) -> bool:
        return now_s - self._told_s >= TOLD_EVERY_S or len(self._signed) >= LIMIT

    def take(self, now_s: float) -> tuple[Signed, ...]:
        """All statements, in order. They count as told now."""
        found, self._signed = tuple(self._signed), []
        self._told_s = now_s
        return found
