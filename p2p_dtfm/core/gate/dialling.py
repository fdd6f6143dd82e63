"""Which peers this one calls at addresses that it has only somebody's word for.

A peer that names a third party's address could make a swarm knock at that door. So a peer whose
address is only claimed is called rarely, and at few addresses. No door is knocked at again and
again, whoever names it.
"""

import collections
from collections.abc import Sequence
from typing import TypeVar

from p2p_dtfm.core.units import SECOND_NS

ADDRESSES_OF_ONE = 2
CLAIMS_EVERY_NS = 5 * SECOND_NS
"""Time between calls to two peers of whose address there is nothing but a claim."""
DOOR_KNOCKS = 2
HOST_CLAIMS = 2
HOST_NAMED = 8
HOST_THERE = 64
NAMED_KNOCKS = 6
"""Knocks at one door, by a peer that looks for a member: it may be about to start again."""
REMEMBERED_NS = 600 * SECOND_NS
SEEN_BURST = 48
SEEN_EVERY_NS = 2 * SECOND_NS
"""A peer that calls from a host may be called back there: this often for each host."""
LOOKS_BURST = 24
LOOK_EVERY_NS = 2 * SECOND_NS
"""Time between calls to two nodes of the directory, at any address that libp2p was told."""
DOORS_REMEMBERED = 4096
BEHIND_A_DOOR = 2
"""Peers, or relays, that one door is said to lead to: one may have taken the place of another."""
DOORS_OF_A_HOST = 5
"""Doors of one host of the internet. Where more members are behind one router, the rest come to
know each other in a view."""

Door = tuple[str, int]
"""Host and port."""
Count = tuple[int, int]
"""How often, and since when."""
Key = TypeVar("Key")


class Dialling:
    """Chooses, of what a peer claims, the addresses that are called now."""

    def __init__(self) -> None:
        self._doors: collections.OrderedDict[Door, Count] = collections.OrderedDict()
        self._claims: collections.OrderedDict[str, Count] = collections.OrderedDict()
        self._named: collections.OrderedDict[str, Count] = collections.OrderedDict()
        self._there: collections.OrderedDict[str, Count] = collections.OrderedDict()
        self._seen: collections.OrderedDict[str, Count] = collections.OrderedDict()
        self._claimed_ns: int | None = None
        self._looks = LOOKS_BURST
        self._looked_ns = 0
        self.refused = 0
        """Peers that were not called for want of a proof."""

    def choose(self, doors: Sequence[Door], seen_host: str | None, now_ns: int) -> list[Door]:
        """The doors to knock at now; empty: not yet. `seen_host` is where the peer's own connection
        comes from, or came from lately."""
        seen = [door for door in dict.fromkeys(doors) if door[0] == seen_host]
        chosen = self.call_back(seen[:ADDRESSES_OF_ONE], now_ns)
        if not chosen:
            chosen = self._choose_claimed(doors, now_ns)
        if not chosen:
            self.refused += 1
        return chosen

    def call_back(self, doors: Sequence[Door], now_ns: int) -> list[Door]:
        """The doors to knock at now, of those that a peer has at the host from which it calls."""
        open_doors = [door for door in dict.fromkeys(doors) if self._may_knock(door, now_ns)]
        if not open_doors or not self._may_call_back(open_doors[0][0], now_ns):
            return []
        return self._knock(open_doors, now_ns)

    def _choose_claimed(self, doors: Sequence[Door], now_ns: int) -> list[Door]:
        if self._claimed_ns is not None and now_ns - self._claimed_ns < CLAIMS_EVERY_NS:
            return []
        chosen: list[Door] = []
        for door in dict.fromkeys(doors):
            if len(chosen) == ADDRESSES_OF_ONE:
                break
            if self._may_knock(door, now_ns) and _may_count(
                self._claims, door[0], HOST_CLAIMS, now_ns
            ):
                chosen.append(door)
        if chosen:
            self._claimed_ns = now_ns
        return self._knock(chosen, now_ns)

    def look_up(self, doors: Sequence[Door], was_there: bool, now_ns: int) -> list[Door]:
        """The doors to knock at now of a peer that the directory names, when this peer looks for
        somebody. `was_there`: the named peer brought its presence to a node that this peer
        believes."""
        chosen: list[Door] = []
        for door in dict.fromkeys(doors):
            fits = len(chosen) < ADDRESSES_OF_ONE and self._may_knock(door, now_ns, NAMED_KNOCKS)
            counts, limit = (self._there, HOST_THERE) if was_there else (self._named, HOST_NAMED)
            if fits and _may_count(counts, door[0], limit, now_ns):
                chosen.append(door)
        return self._knock(chosen, now_ns)

    def may_look(self, now_ns: int) -> bool:
        """Whether one more peer may be called, at addresses that others keep."""
        regained = (now_ns - self._looked_ns) // LOOK_EVERY_NS
        if regained > 0:
            self._looks = min(LOOKS_BURST, self._looks + regained)
            self._looked_ns += regained * LOOK_EVERY_NS
        may = self._looks > 0
        self._looks -= may
        return may

    def give_back(self, doors: Sequence[Door]) -> None:
        """These knocks count for nothing. Either none was made after all, or whoever stands behind
        the door knocked here at this very moment, too."""
        for door in doors:
            _take_back(self._doors, door)
            _take_back(self._claims, door[0])

    def answered(self, door: Door) -> None:
        """The peer that was looked for is there: its door may be knocked at again."""
        self._doors.pop(door, None)
        if (held := self._seen.get(door[0])) is not None:
            self._seen[door[0]] = (min(SEEN_BURST, held[0] + 1), held[1])

    def _may_call_back(self, host: str, now_ns: int) -> bool:
        left, at_ns = self._seen.get(host, (SEEN_BURST, now_ns))
        regained = (now_ns - at_ns) // SEEN_EVERY_NS
        if regained > 0:
            left, at_ns = min(SEEN_BURST, left + regained), at_ns + regained * SEEN_EVERY_NS
        may = left > 0
        _put(self._seen, host, (left - may, at_ns))
        return may

    def _may_knock(self, door: Door, now_ns: int, limit: int = DOOR_KNOCKS) -> bool:
        count, since_ns = self._doors.get(door, (0, now_ns))
        return count < limit or now_ns - since_ns >= REMEMBERED_NS

    def _knock(self, doors: list[Door], now_ns: int) -> list[Door]:
        for door in doors:
            count, since_ns = self._doors.get(door, (0, now_ns))
            if now_ns - since_ns >= REMEMBERED_NS:
                count, since_ns = 0, now_ns
            _put(self._doors, door, (count + 1, since_ns))
        return doors


class NamedDoors:
    """Doors where members are, by the word of a peer that this one has asked: it may have invented
    them."""

    def __init__(self, limit: int = DOORS_REMEMBERED) -> None:
        self._limit = limit
        self._behind: collections.OrderedDict[Door, tuple[str, ...]] = collections.OrderedDict()
        self._of_hosts: collections.Counter[str] = collections.Counter()

    def __len__(self) -> int:
        return len(self._behind)

    def admits(self, door: Door, behind: str, is_public: bool) -> bool:
        """Whether this peer may knock at the door for one more peer. `behind`: that peer, or the
        relay that passes on to it."""
        known = self._behind.get(door, ())
        if behind in known:
            return True
        is_full = not known and is_public and self._of_hosts[door[0]] >= DOORS_OF_A_HOST
        if len(known) >= BEHIND_A_DOOR or is_full:
            return False
        self._of_hosts[door[0]] += not known
        self._behind[door] = (*known, behind)
        if len(self._behind) > self._limit:
            (host, _), _ = self._behind.popitem(last=False)
            self._of_hosts -= collections.Counter({host: 1})
        return True


def _may_count(
    counts: "collections.OrderedDict[str, Count]", host: str, limit: int, now_ns: int
) -> bool:
    count, since_ns = counts.get(host, (0, now_ns))
    if now_ns - since_ns >= REMEMBERED_NS:
        count, since_ns = 0, now_ns
    if count >= limit:
        return False
    _put(counts, host, (count + 1, since_ns))
    return True


def _take_back(counts: "collections.OrderedDict[Key, Count]", key: Key) -> None:
    count, since_ns = counts.get(key, (0, 0))
    if count > 0:
        counts[key] = (count - 1, since_ns)


def _put(kept: "collections.OrderedDict[Key, Count]", key: Key, value: Count) -> None:
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > DOORS_REMEMBERED:
        kept.popitem(last=False)
