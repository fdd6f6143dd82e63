"""Members and links whose loss alone would cut a swarm in parts that no measured link joins.

These are articulation points and bridges of the graph of measured links (Tarjan 1972). They are for
people to see. Nothing is decided by them, since a peer may be reached over links not measured yet.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import msgspec

from p2p_dtfm.core.protocol.records import PeerRecord


class WeakPoints(msgspec.Struct, frozen=True):
    """Peer ids, and pairs of them, each sorted."""

    peers: tuple[str, ...]
    links: tuple[tuple[str, str], ...]


def weak_points(records: Iterable[PeerRecord]) -> WeakPoints:
    """The weak points by these records. A link counts if one of its ends has measured it. A swarm
    of two has none to name: whoever is lost there is missed without any graph."""
    told = {record.peer_id: record for record in records}
    near: dict[str, set[str]] = {peer_id: set() for peer_id in told}
    for peer_id, record in told.items():
        for other in told:
            if other != peer_id and record.link_to(other) is not None:
                near[peer_id].add(other)
                near[other].add(peer_id)
    if len(near) < 3:
        return WeakPoints((), ())
    search = _Search({peer_id: sorted(others) for peer_id, others in near.items()})
    for peer_id in sorted(near):
        if peer_id not in search.number:
            search.visit(peer_id)
    return WeakPoints(tuple(sorted(search.peers)), tuple(sorted(search.links)))


@dataclass(slots=True)
class _Search:
    """A search depth first: when each peer is reached, and how far back each can reach without the
    link by which it was reached."""

    near: dict[str, list[str]]
    number: dict[str, int] = field(default_factory=dict)
    back: dict[str, int] = field(default_factory=dict)
    peers: set[str] = field(default_factory=set)
    links: set[tuple[str, str]] = field(default_factory=set)

    def visit(self, root: str) -> None:
        branches = 0
        way: list[tuple[str, str, Iterator[str]]] = [(root, "", iter(self.near[root]))]
        self._arrive(root)
        while way:
            here, came_from, others = way[-1]
            after = next(others, None)
            if after is None:
                way.pop()
                if came_from:
                    self._leave(here, came_from, came_from == root)
                    branches += came_from == root
            elif after not in self.number:
                self._arrive(after)
                way.append((after, here, iter(self.near[after])))
            elif after != came_from:
                self.back[here] = min(self.back[here], self.number[after])
        if branches > 1:
            self.peers.add(root)

    def _arrive(self, peer_id: str) -> None:
        self.number[peer_id] = self.back[peer_id] = len(self.number)

    def _leave(self, here: str, came_from: str, from_root: bool) -> None:
        self.back[came_from] = min(self.back[came_from], self.back[here])
        if self.back[here] >= self.number[came_from] and not from_root:
            self.peers.add(came_from)
        if self.back[here] > self.number[came_from]:
            self.links.add((min(here, came_from), max(here, came_from)))
