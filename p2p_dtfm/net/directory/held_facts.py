"""Which facts of members a node keeps for others: never older ones than it has, and only so
many."""

import collections

OWN_LIMIT = 2048
"""The most facts of members of the runs that this node takes part in."""
OTHERS_LIMIT_BYTES = 8 << 20
ENTRY_BYTES = 2048
"""What an entry takes beside its value, in hivemind's memory and here."""


class HeldFacts:
    """Remembers, by key, the facts that were let in."""

    def __init__(self) -> None:
        self._held: collections.OrderedDict[bytes, tuple[tuple[int, int], float, int]]
        self._held = collections.OrderedDict()
        self._others_bytes = self._own = 0

    @property
    def others_bytes(self) -> int:
        """Bytes of facts in runs that are not this node's own."""
        return self._others_bytes

    def refusal(
        self, key: bytes, version: tuple[int, int], size: int, expires_s: float, now_s: float
    ) -> str | None:
        """Why facts are refused. If they are not, they are counted. `size` is 0 for a run of this
        node's own."""
        before = self._held.get(key)
        if before is not None and before[1] > now_s and version < before[0]:
            return f"facts of life and number {version}, while {before[0]} is known"
        if before is None and self._is_full(size):
            self._forget_expired(now_s)
            if self._is_full(size):
                return "there is no room for further facts"
        self._forget(key)
        self._held[key] = version, expires_s, size
        self._count(size, 1)
        return None

    def _is_full(self, size: int) -> bool:
        if size:
            return self._others_bytes + size > OTHERS_LIMIT_BYTES
        return self._own >= OWN_LIMIT

    def _forget_expired(self, now_s: float) -> None:
        for key in [key for key, (_, expires_s, _) in self._held.items() if expires_s <= now_s]:
            self._forget(key)

    def _forget(self, key: bytes) -> None:
        if (before := self._held.pop(key, None)) is not None:
            self._count(before[2], -1)

    def _count(self, size: int, sign: int) -> None:
        self._others_bytes += sign * size
        self._own += sign * (not size)
