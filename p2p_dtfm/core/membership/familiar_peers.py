"""Which peers a peer knows: by its user's word, from an earlier view, or by the word of such peers.

Keys are made for nothing: any number of peers can sign a view, and train as far as they like. So
strangers that want to be followed have no say in whom this peer follows.
"""

from collections.abc import Iterable

from p2p_dtfm.core.messages.message_bounds import GIVEN_LIMIT

FAMILIAR_LIMIT = 4096
STRANGERS_LIMIT = 512


class FamiliarPeers:
    """`given`: peers that the user named for this start. Strangers are remembered apart: who makes
    keys by the thousand does not crowd out the peers that count."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._given: dict[str, None] = {}
        self._familiar: dict[str, None] = {}
        self._strangers: dict[str, None] = {}

    def give(self, peer_ids: Iterable[str]) -> None:
        """The user has named these peers."""
        self._add(self._given, peer_ids, GIVEN_LIMIT)

    def meet(self, peer_ids: Iterable[str]) -> None:
        """These peers were members of a view with this one, or are familiar to such members."""
        self._add(self._familiar, peer_ids, FAMILIAR_LIMIT)

    def hear_of(self, peer_id: str) -> None:
        """This peer has heard of one that may be in another view."""
        if not self.holds(peer_id):
            self._add(self._strangers, [peer_id], STRANGERS_LIMIT)

    def _add(self, known: dict[str, None], peer_ids: Iterable[str], limit: int) -> None:
        for peer_id in peer_ids:
            if peer_id != self._me:
                known.setdefault(peer_id)
            if known is not self._strangers:
                self._strangers.pop(peer_id, None)
        while len(known) > limit:
            del known[next(iter(known))]

    def holds(self, peer_id: str) -> bool:
        return peer_id in self._given or peer_id in self._familiar

    def has_met(self, peer_id: str) -> bool:
        """As `holds`, but the user's word alone does not count: it may be a bootstrap node."""
        return peer_id in self._familiar

    def any_of(self, peer_ids: Iterable[str]) -> bool:
        """Whether one of them is familiar."""
        return any(map(self.holds, peer_ids))

    @property
    def is_empty(self) -> bool:
        return not self._given and not self._familiar

    @property
    def given(self) -> frozenset[str]:
        return frozenset(self._given)

    @property
    def all(self) -> tuple[str, ...]:
        """All known peers, the familiar and the given ones at the end."""
        return tuple(dict.fromkeys((*self._strangers, *self._familiar, *self._given)))

    def next_of(self, outside: Iterable[str], count: int) -> tuple[str, ...]:
        """`count` of the peers outside a view, in turns; familiar ones have half of the places."""
        left = set(outside)
        near = [peer for peer in (*self._given, *self._familiar) if peer in left]
        far = [peer for peer in self._strangers if peer in left]
        chosen = [*dict.fromkeys(near)][: max(count // 2, count - len(far))]
        chosen += far[: count - len(chosen)]
        for peer_id in chosen:  # the others' turn is next
            for known in (self._given, self._familiar, self._strangers):
                if peer_id in known:
                    known[peer_id] = known.pop(peer_id)
        return tuple(sorted(chosen))
