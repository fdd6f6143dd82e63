"""How far those who are to join have come with their states, by the word of those who give them."""

from collections.abc import Mapping

from p2p_dtfm.core.protocol.snapshot import Member

WORDS_LIMIT = 1 << 16


class StatesGiven:
    """Since a view was agreed on."""

    def __init__(self) -> None:
        self._most: dict[tuple[str, Member], int] = {}
        """Newcomer and who gives: the most that was said."""
        self._grown_ns: dict[str, int] = {}

    def begin(self) -> None:
        """A view is agreed on: nothing has been given for it."""
        self._most, self._grown_ns = {}, {}

    def note(self, by: Member, given: Mapping[str, int], now_ns: int) -> None:
        """So many bytes `by` has given to each in all."""
        for peer_id, size in given.items():
            known = (peer_id, by) in self._most
            if size > self._most.get((peer_id, by), 0) and (known or len(self._most) < WORDS_LIMIT):
                self._most[peer_id, by] = size
                self._grown_ns[peer_id] = now_ns

    def grown_ns(self, newcomer: str) -> int | None:
        """When it was last heard that one has got more; None: it has got nothing."""
        return self._grown_ns.get(newcomer)

    def slept(self, gap_ns: int) -> None:
        """This peer has not listened for so long."""
        self._grown_ns = {peer_id: at_ns + gap_ns for peer_id, at_ns in self._grown_ns.items()}
