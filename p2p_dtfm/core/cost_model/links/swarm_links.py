"""Round trip and rate of the way between any two members: measured, estimated, or guessed.

What the sender has measured counts, or else what the receiver has, for the other direction. Where
neither has, and both say where they are, the way is estimated. The round trip then follows from
their places. The rate is the lower of two medians of measured links: of the sender's to peers near
the receiver, and of the receiver's from peers near the sender. Otherwise the way is a guess, so low
that a measured link is preferred.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum

import msgspec

from p2p_dtfm.core.cost_model.links.coordinates import round_trip_us
from p2p_dtfm.core.cost_model.links.member_links import MemberLinks
from p2p_dtfm.core.protocol.facts.brief_links import Coordinate, Link
from p2p_dtfm.core.protocol.records import PeerRecord, Reachability

UNKNOWN_ROUND_TRIP_NS = 300_000_000
"""The round trip of a link that neither end has measured: halfway around the world."""
UNKNOWN_BYTES_PER_S = 250_000
"""The rate of a link that neither end has measured: 2 Mbit/s, so a measured link is preferred."""
UNLIMITED_BYTES_PER_S = 1 << 50
"""No rate counts as more, whatever a record states: the compiled weights leave higher ones to
their slow twin. One member that stated such a limit made all plan twice as long."""
REGIONS_LIMIT = 32
REGION_US = 30_000
"""Peers whose places are at most so far apart are in one region: half of Europe."""


class Source(StrEnum):
    """Where a figure is from."""

    MEASURED = "measured"
    REVERSED = "measured the other way"
    ESTIMATED = "estimated"
    GUESSED = "guessed"


class SwarmLinks:
    """The links among the peers of these records. Equal records make equal links."""

    def __init__(self, records: Iterable[PeerRecord]) -> None:
        self._records = {record.peer_id: record for record in records}
        members = MemberLinks(self._records)
        self._measured = {it: members.of(record) for it, record in self._records.items()}
        places = {
            peer_id: record.brief.at
            for peer_id, record in sorted(self._records.items())
            if record.brief is not msgspec.UNSET
        }
        self._estimates = _Estimates(places, self._measured) if places else None

    def way(self, sender: PeerRecord, receiver: PeerRecord) -> tuple[int, int]:
        """(round trip, bytes per second), without what either end shares among all its links."""
        if sender is receiver:
            return 0, UNLIMITED_BYTES_PER_S
        one, other = sender.peer_id, receiver.peer_id
        there = self._measured[one].get(other)
        back = self._measured[other].get(one)
        if there is not None and there.bytes_per_s:
            return there.round_trip_ns, there.bytes_per_s
        known = there or back
        if known is not None and back is not None and back.bytes_per_s:
            return known.round_trip_ns, back.bytes_per_s
        relayed = sender.reachability is Reachability.RELAYED is receiver.reachability
        if known is None and self._estimates is not None:
            estimate = self._estimates.way(one, other)
            if estimate is not None:
                round_trip_ns, rate = estimate
                return round_trip_ns, max(1, rate // (4 if relayed else 1))
        # two peers that nobody can dial meet only through a relay
        rate = UNKNOWN_BYTES_PER_S // (4 if relayed else 1)
        return known.round_trip_ns if known is not None else UNKNOWN_ROUND_TRIP_NS, rate

    def ways(self, sender: PeerRecord, receivers: Sequence[PeerRecord]) -> list[tuple[int, int]]:
        """`way` to each receiver, in one call: a table of a thousand peers asks for a million."""
        measured = self._measured[sender.peer_id]
        return [
            (link.round_trip_ns, link.bytes_per_s)
            if (link := measured.get(to.peer_id)) is not None and link.bytes_per_s
            else self.way(sender, to)
            for to in receivers
        ]

    def flow(self, sender: PeerRecord, receiver: PeerRecord) -> tuple[int, int]:
        """(bytes per second of one flow within what either end shares among all, round trip)."""
        round_trip_ns, rate = self.way(sender, receiver)
        limits = limit(sender.uplink_bytes_per_s), limit(receiver.downlink_bytes_per_s)
        return min(rate, *limits), round_trip_ns

    def link(self, sender: str, receiver: str) -> Link:
        """The same as `way`."""
        return Link(*self.way(self._records[sender], self._records[receiver]))

    def source(self, sender: str, receiver: str) -> Source:
        """Where the figures of `way` are from."""
        if receiver in self._measured[sender]:
            return Source.MEASURED
        if sender in self._measured[receiver]:
            return Source.REVERSED
        knows = self._estimates is not None and self._estimates.way(sender, receiver) is not None
        return Source.ESTIMATED if knows else Source.GUESSED

    def counts(self) -> Counter[Source]:
        """How many directed pairs have figures of each source."""
        return Counter(
            self.source(one, other)
            for one in self._records
            for other in self._records
            if one != other
        )


def limit(bytes_per_s: int) -> int:
    """A limit as a record states it, where 0 stands for unlimited."""
    return min(bytes_per_s or UNLIMITED_BYTES_PER_S, UNLIMITED_BYTES_PER_S)


class _Estimates:
    """Rates between regions are medians of what was measured; round trips follow from places."""

    def __init__(
        self, places: Mapping[str, Coordinate], measured: Mapping[str, Mapping[str, Link]]
    ) -> None:
        self._places = places
        self._region = _regions(places)
        count = 1 + max(self._region.values())
        out, into = ({p: _empty(count) for p in places} for _ in range(2))
        between = [_empty(count) for _ in range(count)]
        for one, other, rate in _rates(measured):
            if one in places and other in places:
                from_region, to_region = self._region[one], self._region[other]
                out[one][to_region].append(rate)
                into[other][from_region].append(rate)
                between[from_region][to_region].append(rate)
        self._between = [_medians(row)[0] for row in between]
        self._out = {peer: _medians(rows) for peer, rows in out.items()}
        self._into = {peer: _medians(rows) for peer, rows in into.items()}

    def way(self, one: str, other: str) -> tuple[int, int] | None:
        """(round trip, bytes per second); None where a place is unknown, or where nobody has
        measured a link of this kind."""
        here, there = self._places.get(one), self._places.get(other)
        if here is None or there is None:
            return None
        from_region, to_region = self._region[one], self._region[other]
        sends, sends_anywhere = self._out[one]
        receives, receives_anywhere = self._into[other]
        rate = self._between[from_region][to_region]
        known = [sends[to_region], receives[from_region]]
        known = [each for each in known if each] or ([rate] if rate else [])
        known = known or [each for each in (sends_anywhere, receives_anywhere) if each]
        if not known:
            return None
        return max(1, round_trip_us(here, there)) * 1000, min(known)


def _empty(count: int) -> list[list[int]]:
    return [[] for _ in range(count)]


def _rates(measured: Mapping[str, Mapping[str, Link]]) -> Iterator[tuple[str, str, int]]:
    for one, links in measured.items():
        for other, link in links.items():
            if link.bytes_per_s:
                yield one, other, link.bytes_per_s


def _regions(places: Mapping[str, Coordinate]) -> dict[str, int]:
    """The region of each peer, by nearness to the region's first peer in the order of ids. Heights
    do not count."""
    first: list[Coordinate] = []
    found = {}
    for peer_id, place in places.items():
        flat = [round_trip_us(place, each) - place.height_us - each.height_us for each in first]
        near = min(range(len(flat)), key=flat.__getitem__, default=None)
        if near is None or (flat[near] > REGION_US and len(first) < REGIONS_LIMIT):
            near = len(first)
            first.append(place)
        found[peer_id] = near
    return found


def _medians(rows: Sequence[list[int]]) -> tuple[list[int], int]:
    """The median of each region, and of all; 0 where nothing is measured."""
    return [_median(rates) for rates in rows], _median([rate for rates in rows for rate in rates])


def _median(rates: list[int]) -> int:
    """The lower median."""
    return sorted(rates)[(len(rates) - 1) // 2] if rates else 0
