"""What others have said of views that have not taken over here."""

from collections import deque
from typing import Generic, TypeVar

from p2p_dtfm.core.messages.prepared import STEPS_AHEAD_LIMIT
from p2p_dtfm.ports import rarely

Said = TypeVar("Said")

SENDERS_LIMIT = 1024
EACH_LIMIT = 2 * STEPS_AHEAD_LIMIT
"""Words kept of each sender; older ones make room."""
LIMIT_BYTES = 8 << 20
"""Size of all words as they came. Read, they take up to eight times as much."""


class EarlyWords(Generic[Said]):
    """A peer that took over earlier may speak before this one knows the view. While this peer is in
    no view, anybody may. Where there is no room for all, the sender that says most makes room for
    others."""

    def __init__(self) -> None:
        self._said: dict[str, deque[tuple[Said, int]]] = {}
        self._held_bytes = 0

    def keep(self, sender: str, said: Said, size_bytes: int) -> bool:
        """False: there is no room for it."""
        is_full = sender not in self._said and len(self._said) >= SENDERS_LIMIT
        if is_full or rarely.happens("no early word"):
            return False
        while len(self._said.get(sender, ())) >= EACH_LIMIT:
            self._drop_oldest_of(sender)
        while self._said and self._held_bytes + size_bytes > LIMIT_BYTES:
            largest = max(self._said, key=self._bytes_of)
            if self._bytes_of(largest) <= self._bytes_of(sender) + size_bytes:
                return False
            self._drop_oldest_of(largest)
        self._said.setdefault(sender, deque()).append((said, size_bytes))
        self._held_bytes += size_bytes
        return True

    def take(self) -> list[tuple[str, Said]]:
        """All, by sender, oldest first; they are kept no longer."""
        found = [(sender, said) for sender, words in self._said.items() for said, _ in words]
        self._said, self._held_bytes = {}, 0
        return found

    def _bytes_of(self, sender: str) -> int:
        return sum(size_bytes for _, size_bytes in self._said.get(sender, ()))

    def _drop_oldest_of(self, sender: str) -> None:
        words = self._said[sender]
        self._held_bytes -= words.popleft()[1]
        if not words:
            del self._said[sender]
