"""Newcomers that a member has admitted: they get what they need to join."""

from p2p_dtfm.core.units import SECOND_NS

ADMITTED_NS = 900 * SECOND_NS
ADMITTED_LIMIT = 64
"""When there are more, the one admitted first gives way. In a flood each still has seconds, and may
knock again."""


class Admissions:
    """Who has knocked, or asked to join, and when."""

    def __init__(self) -> None:
        self._since_ns: dict[str, int] = {}

    def admit(self, peer_id: str, now_ns: int) -> None:
        """The peer knocks: from now on it counts as a newcomer."""
        self._since_ns.setdefault(peer_id, now_ns)
        while len(self._since_ns) > ADMITTED_LIMIT:
            del self._since_ns[next(iter(self._since_ns))]

    def holds(self, peer_id: str, now_ns: int) -> bool:
        since_ns = self._since_ns.get(peer_id)
        if since_ns is not None and now_ns - since_ns > ADMITTED_NS:
            del self._since_ns[peer_id]
            return False
        return since_ns is not None

    def forget(self, peer_id: str) -> None:
        self._since_ns.pop(peer_id, None)
