"""Prepared of a peer that computes alone, which others may hear of a little later.

Nobody waits for them, and each message costs both ends and their p2pd more than a millisecond of
processor: three spares that hear of six steps a second take a tenth of a core from who computes.
"""

from p2p_dtfm.core.protocol.signed import Signed
from p2p_dtfm.core.protocol.snapshot import ViewId

TOLD_EVERY_S = 0.5
LIMIT = 16
"""Statements in one message."""


class HeldBack:
    """What the others have not been told of one view."""

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
        """All, in order; they are told now."""
        found, self._signed = tuple(self._signed), []
        self._told_s = now_s
        return found
