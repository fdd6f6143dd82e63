"""How far off the planner's estimates of links were, once those links were measured."""

import collections
import logging
import statistics

import msgspec

from p2p_dtfm.core.cost_model.links.swarm_links import Source, SwarmLinks
from p2p_dtfm.core.protocol.facts.brief_links import Link
from p2p_dtfm.core.protocol.snapshot import Snapshot

KEPT = 64

log = logging.getLogger("p2p_dtfm")


class EstimateErrors(msgspec.Struct, frozen=True):
    """Medians of the last errors: 0.1 is a tenth of what was measured, too much or too little."""

    links: int
    round_trip: float
    rate: float


class EstimatesKept:
    """The errors of estimated links from this peer."""

    def __init__(self) -> None:
        self._off: collections.deque[tuple[float, float]] = collections.deque(maxlen=KEPT)

    def measured_in(self, snapshot: Snapshot, me: str, peer_id: str, link: Link) -> None:
        """Count the estimate of a link, if this snapshot's plan was made without the measured
        one."""
        records = {record.peer_id: record for record in snapshot.records}
        if me not in records or peer_id not in records or records[me].brief is msgspec.UNSET:
            return
        links = SwarmLinks(snapshot.records)
        if links.source(me, peer_id) is Source.ESTIMATED:
            self.measured(peer_id, links.link(me, peer_id), link)

    def measured(self, peer_id: str, estimate: Link, link: Link) -> None:
        """Count the error of one estimate, now that its link is measured."""
        off = (
            abs(estimate.round_trip_ns - link.round_trip_ns) / max(1, link.round_trip_ns),
            abs(estimate.bytes_per_s - link.bytes_per_s) / max(1, link.bytes_per_s),
        )
        self._off.append(off)
        log.info(
            "link to %s: estimated %.1f ms and %.1f Mbit/s, measured %.1f ms and %.1f Mbit/s",
            peer_id,
            estimate.round_trip_ns / 1e6,
            estimate.bytes_per_s * 8 / 1e6,
            link.round_trip_ns / 1e6,
            link.bytes_per_s * 8 / 1e6,
        )

    @property
    def errors(self) -> EstimateErrors | None:
        """The medians; None where no estimate was put to the test."""
        if not self._off:
            return None
        trips, rates = zip(*self._off, strict=True)
        return EstimateErrors(
            len(self._off), round(statistics.median(trips), 3), round(statistics.median(rates), 3)
        )
