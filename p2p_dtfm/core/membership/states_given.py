"""How far newcomers have come with fetching states, by the word of the peers that give them."""

from collections.abc import Callable, Mapping

from p2p_dtfm.core.protocol.snapshot import Member

WORDS_LIMIT = 1 << 16
PARTS = 16
"""Progress counts only by at least one part in so many of what a newcomer needs. Else a newcomer
that takes a byte now and then would keep all from the view."""


class StatesGiven:
    """States given since a view was agreed on."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, Member], int] = {}
        """By (newcomer, giver): the most bytes that the giver has said it gave."""
        self._has: dict[str, int] = {}
        """By newcomer: the sum of these."""
        self._grown_ns: dict[str, int] = {}
        self._needs: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        """By newcomer: how much it had when it last got on."""

    def begin(self, needs: Mapping[str, int] | None = None) -> None:
        """A view is agreed on: nothing has been given for it. `needs`: by peer, bytes of the states
        that its place needs; for a peer that is not named all progress counts."""
        self._most, self._has, self._grown_ns, self._counted = {}, {}, {}, {}
        self._needs = dict(needs or {})

    def note(self, by: Member, given: Mapping[str, int], now_ns: int) -> None:
        """`given`: by newcomer, how many bytes `by` says it has given to it in all."""
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
        """When the newcomer was last heard to have got on; None: it has got nothing."""
        return self._grown_ns.get(newcomer)

    def slept(self, moved_ns: Callable[[int], int]) -> None:
        """This peer has not listened for a while: `moved_ns` moves each time by that."""
        self._grown_ns = {peer_id: moved_ns(at_ns) for peer_id, at_ns in self._grown_ns.items()}
