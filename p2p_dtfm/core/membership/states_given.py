"""How far those who are to join have come with their states, by the word of those who give them."""

from collections.abc import Callable, Mapping

from p2p_dtfm.core.protocol.snapshot import Member

WORDS_LIMIT = 1 << 16
PARTS = 16
"""Less than such a part of what one needs does not count: whoever takes a byte now and then would
keep all from the view."""


class StatesGiven:
    """Since a view was agreed on."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, Member], int] = {}
        """Newcomer and who gives: the most that was said."""
        self._has: dict[str, int] = {}
        """Of each the sum of these."""
        self._grown_ns: dict[str, int] = {}
        self._needs: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        """How much each had when it last got on."""

    def begin(self, needs: Mapping[str, int] | None = None) -> None:
        """A view is agreed on: nothing has been given for it. `needs`: bytes of the states of each
        place in it; of who is not named every word counts."""
        self._most, self._has, self._grown_ns, self._counted = {}, {}, {}, {}
        self._needs = dict(needs or {})

    def note(self, by: Member, given: Mapping[str, int], now_ns: int) -> None:
        """So many bytes `by` has given to each in all."""
        for peer_id, size in given.items():
            before = self._most.get((peer_id, by), 0)
            known = (peer_id, by) in self._most
            if size > before and (known or len(self._most) < WORDS_LIMIT):
                self._most[peer_id, by] = size
                self._has[peer_id] = self._has.get(peer_id, 0) + size - before
                self._count(peer_id, now_ns)

    def _count(self, peer_id: str, now_ns: int) -> None:
        has = self._has[peer_id]
        before = self._counted.get(peer_id)
        if before is None or PARTS * (has - before) >= self._needs.get(peer_id, 0):
            self._counted[peer_id] = has
            self._grown_ns[peer_id] = now_ns

    def grown_ns(self, newcomer: str) -> int | None:
        """When it was last heard that one has got on; None: it has got nothing."""
        return self._grown_ns.get(newcomer)

    def slept(self, moved_ns: Callable[[int], int]) -> None:
        """This peer has not listened for a while, after which everything was later."""
        self._grown_ns = {peer_id: moved_ns(at_ns) for peer_id, at_ns in self._grown_ns.items()}
