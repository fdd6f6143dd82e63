"""Links of a swarm that are cut, made worse, or change a byte, through the shape that all its
daemons follow."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from p2p_dtfm.net.shaping import Shape, ShapedLink
from p2p_dtfm.testbed.chaos_schedule import ChaosFault

DEGRADED_LATENCY_NS = 50_000_000
DEGRADED_BYTES_PER_S = 4_000_000

Way = tuple[str, str]
"""Peer ids: from and to."""


class HarmedLinks:
    """The links in the shape at `path`. `ids` are peer ids by the daemons' names."""

    def __init__(self, path: Path, ids: dict[str, str]) -> None:
        self._path = path
        self._shape = Shape.load(path)
        self._ids = ids
        self._harms: list[tuple[ChaosFault, frozenset[Way]]] = []
        """What is done to links now. Two faults may harm one link."""
        self._corrupted: dict[Way, int] = {}

    def harm(self, fault: ChaosFault) -> Callable[[], None]:
        """Does the fault. The function that is returned ends it."""
        links = self._links_of(fault)
        if fault.kind == "corrupt":
            return self._corrupt(fault.peers[0], links)
        harm = (fault, frozenset(links))
        self._harms.append(harm)
        self._save_shape()

        def heal() -> None:
            self._harms.remove(harm)
            self._save_shape()

        return heal

    def _corrupt(self, name: str, first: list[Way]) -> Callable[[], None]:
        """Changes a byte of what the peer sends next this way. If it sends nothing, the returned
        function changes what it sends anyone."""
        number = 1 + max(self._corrupted.values(), default=0)
        ways = [(link.origin, link.to) for link in self._shape.links]

        def damage(ways: list[Way]) -> None:
            self._corrupted |= dict.fromkeys(ways, number)
            self._save_shape()

        sender = self._ids[name]
        damage([way for way in first if way[0] == sender])
        return lambda: damage([way for way in ways if way[0] == sender])

    def _links_of(self, fault: ChaosFault) -> list[Way]:
        harmed = {self._ids[name] for name in fault.peers}
        ways = [(link.origin, link.to) for link in self._shape.links]
        if fault.kind == "partition":
            return [way for way in ways if (way[0] in harmed) != (way[1] in harmed)]
        if fault.kind == "degrade":
            return [way for way in ways if harmed & set(way)]
        return [way for way in ways if harmed == set(way)]

    def _save_shape(self) -> None:
        """Saves each link with all that is done to it now."""
        links = tuple(map(self._as_harmed, self._shape.links))
        msgspec.structs.replace(self._shape, links=links).save(self._path)

    def _as_harmed(self, link: ShapedLink) -> ShapedLink:
        way = link.origin, link.to
        harmed = msgspec.structs.replace(link, corrupted=self._corrupted.get(way, 0))
        for fault, ways in self._harms:
            if way in ways:
                harmed = _harmed(fault, harmed)
        return harmed


def _harmed(fault: ChaosFault, link: ShapedLink) -> ShapedLink:
    if fault.kind != "degrade":
        return msgspec.structs.replace(link, cut=True)
    if fault.factor > 1:
        return msgspec.structs.replace(
            link,
            latency_ns=int(link.latency_ns * fault.factor),
            bytes_per_s=int(link.bytes_per_s / fault.factor),
        )
    return msgspec.structs.replace(
        link,
        latency_ns=link.latency_ns + DEGRADED_LATENCY_NS,
        bytes_per_s=min(link.bytes_per_s or DEGRADED_BYTES_PER_S, DEGRADED_BYTES_PER_S),
    )
