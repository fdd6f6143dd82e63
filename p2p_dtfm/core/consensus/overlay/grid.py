"""The overlay of a swarm of many: rows of peers that are near to one another.

A peer tells its own row and one peer in each other row, and those tell their rows. So news comes to
each peer once, by one far and one near hop. With as many rows as a row has peers, the degree is
twice the square root of their number. The next peer in a row stands in for one that is lost.
`docs/decisions/0049-agreement-of-many.md` says why the overlay is no random graph.
"""

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import isqrt

from p2p_dtfm.core.cost_model.links.member_links import MemberLinks
from p2p_dtfm.core.protocol.canonical import digest_bytes
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot, ViewId

NEAR_SHARE = 4
"""A peer joins a row only by a round trip of at most the longest measured one, divided by this."""
SMALL_SHARE = 4
"""Rows smaller than the usual size, divided by this, are put together into new ones."""
HOSTS = 4


@dataclass(frozen=True)
class Grid:
    """Each peer stands in one row."""

    rows: tuple[tuple[str, ...], ...]

    @cached_property
    def places(self) -> dict[str, tuple[int, int]]:
        """Of each peer: the number of its row, and its place in that row."""
        return {peer: (n, at) for n, row in enumerate(self.rows) for at, peer in enumerate(row)}

    @cached_property
    def in_order(self) -> list[str]:
        """All peers, in the order of their names."""
        return sorted(self.places)

    @cached_property
    def links(self) -> MemberLinks:
        """What records say of the links to these peers."""
        return MemberLinks(self.places)

    def row_mates(self, peer_id: str, lost: Collection[str] = ()) -> tuple[str, ...]:
        """All others in its row that are not lost."""
        row, _ = self.places[peer_id]
        return tuple(it for it in self.rows[row] if it != peer_id and it not in lost)

    def across(self, peer_id: str, lost: Collection[str] = ()) -> tuple[str, ...]:
        """One peer in each other row, which passes on what `peer_id` says; none in a row whose
        peers are all lost."""
        own, at = self.places[peer_id]
        found = []
        for number, row in enumerate(self.rows):
            turned = (row[(at + n) % len(row)] for n in range(len(row)))
            first = next((peer for peer in turned if peer not in lost), None)
            if number != own and first is not None:
                found.append(first)
        return tuple(found)

    @cached_property
    def _towards(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {peer: [] for peer in self.places}
        for peer in self.places:
            for other in self.across(peer):
                found[other].append(peer)
        return {peer: tuple(others) for peer, others in found.items()}

    def neighbours(self, peer_id: str) -> frozenset[str]:
        """Peers that `peer_id` tells or hears directly: neighbours watch one another."""
        if peer_id not in self.places:
            return frozenset()
        others = (*self.row_mates(peer_id), *self.across(peer_id), *self._towards[peer_id])
        return frozenset(others)

    @cached_property
    def watchers(self) -> dict[str, frozenset[str]]:
        """The neighbours of each peer."""
        return {peer: self.neighbours(peer) for peer in self.places}

    def are_row_mates(self, one: str, other: str) -> bool:
        places = self.places
        return one in places and other in places and places[one][0] == places[other][0]


@lru_cache(maxsize=8)
def grid_in_order(peer_ids: tuple[str, ...], sizes: Sequence[int] = ()) -> Grid:
    """Rows of these sizes, or of the usual size where these do not fit the peers."""
    if any(size < 1 for size in sizes) or sum(sizes) != len(peer_ids):
        usual = usual_size(len(peer_ids))
        sizes = [min(usual, len(peer_ids) - at) for at in range(0, len(peer_ids), usual)]
    rows, begin = [], 0
    for size in sizes:
        rows.append(tuple(peer_ids[begin : begin + size]))
        begin += size
    return Grid(tuple(rows))


def usual_size(count: int) -> int:
    """The usual number of peers in a row: the square root of how many there are."""
    return isqrt(max(0, count - 1)) + 1


@dataclass(frozen=True)
class _Roll:
    """The records of a view's members. Rolls are compared by the view's id, which says what records
    they are."""

    view: ViewId
    records: tuple[PeerRecord, ...] = field(compare=False)


def grid_of_view(snapshot: Snapshot, view: ViewId) -> Grid:
    """The grid of a view's members."""
    return _grid_of(_Roll(view, snapshot.records))


@lru_cache(maxsize=8)
def _grid_of(roll: _Roll) -> Grid:
    return near_grid(roll.records)


def near_grid(records: Iterable[PeerRecord]) -> Grid:
    """Rows of peers that are near to one another, by what they measured. A pure function of the
    records."""
    round_trips = _round_trips(records)
    size = usual_size(len(round_trips))
    longest_ns = max((ns for ways in round_trips.values() for ns in ways.values()), default=0)
    free, rows = dict.fromkeys(sorted(round_trips)), []
    while free:
        near = _grown(next(iter(free)), free, round_trips, 2 * size, longest_ns // NEAR_SHARE)
        for row in _cut(near, size):
            rows.append(row)
            for peer in row:
                del free[peer]
    return Grid(tuple(tuple(sorted(row)) for row in _without_small(rows, size)))


def _round_trips(records: Iterable[PeerRecord]) -> dict[str, dict[str, int]]:
    """Round trips, alike in both directions: the shorter one of the two that were measured."""
    records = list(records)
    found: dict[str, dict[str, int]] = {record.peer_id: {} for record in records}
    members = MemberLinks(found)
    for record in records:
        me = record.peer_id
        for other, link in members.of(record).items():
            if other in found and other != me:
                shorter_ns = min(link.round_trip_ns, found[other].get(me, link.round_trip_ns))
                found[me][other] = found[other][me] = shorter_ns
    return found


def _cut(near: list[str], size: int) -> list[list[str]]:
    """One row of the nearest peers. Where fewer than two rows are near, all of them: in one row, or
    in two halves if they are more than one and a half rows."""
    if len(near) >= 2 * size:
        return [near[:size]]
    if 2 * len(near) <= 3 * size:
        return [near]
    half = len(near) // 2
    return [near[:half], near[half:]]


def _grown(
    first: str,
    free: Mapping[str, None],
    round_trips: Mapping[str, Mapping[str, int]],
    size: int,
    limit_ns: int,
) -> list[str]:
    """A row that begins with `first`: it always takes next the peer that is nearest to some peer of
    it."""
    row, taken = [first], {first}
    heap = [(ns, peer) for peer, ns in round_trips[first].items() if peer in free]
    heapq.heapify(heap)
    while heap and len(row) < size:
        ns, peer = heapq.heappop(heap)
        if peer in taken or ns > limit_ns:
            continue
        row.append(peer)
        taken.add(peer)
        for other, way_ns in round_trips[peer].items():
            if other in free and other not in taken:
                heapq.heappush(heap, (way_ns, other))
    return row


def _without_small(rows: list[list[str]], size: int) -> list[list[str]]:
    """The rows; peers of those that are too small make rows of their own."""
    kept = [row for row in rows if len(row) * SMALL_SHARE >= size]
    rest = [peer for row in rows if len(row) * SMALL_SHARE < size for peer in row]
    return [*kept, *(rest[at : at + size] for at in range(0, len(rest), size))]


def hosts_of(peer_id: str, record: PeerRecord | None, grid: Grid) -> tuple[str, ...]:
    """Peers of the grid that speak with a peer that has no place in it: the nearest ones, and
    others that follow from its name."""
    places = grid.places
    links = grid.links.of(record) if record is not None else {}
    near = sorted((link.round_trip_ns, it) for it, link in links.items() if it in places)
    chosen = dict.fromkeys(other for _, other in near[: HOSTS // 2])
    everybody = grid.in_order
    start = int(digest_bytes(peer_id.encode())[:12], 16)
    for n in range(min(HOSTS, len(everybody))):
        chosen[everybody[(start + n * (len(everybody) // HOSTS + 1)) % len(everybody)]] = None
    return tuple(chosen)[:HOSTS]
