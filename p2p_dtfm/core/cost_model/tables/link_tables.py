"""What links carry, between peers as numbers 0 .. n-1."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat

from p2p_dtfm.core.cost_model.links.swarm_links import (
    UNLIMITED_BYTES_PER_S,
    SwarmLinks,
    limit,
)
from p2p_dtfm.core.protocol.records import PeerRecord

MESSAGE_NS = 100_000
"""Time of framing, checksum and hand-over of one message, during which its link is taken."""

Matrix = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class LinkTables:
    """Latencies and rates of links. Matrices are indexed [from][to]."""

    uplink_bytes_per_s: tuple[int, ...]
    downlink_bytes_per_s: tuple[int, ...]
    latency_ns: Matrix
    """Latency one way."""
    bytes_per_s: Matrix
    """Rate of one flow: the least of the link's own rate, the sender's uplink and the receiver's
    downlink."""
    transmit_ns: Matrix
    """Time to send a boundary tensor, with the handling of one message."""
    pair_bytes_per_s: Matrix
    """Rate of the link itself in the slower direction; symmetric."""

    @cached_property
    def reach_bytes_per_s(self) -> tuple[int, ...]:
        """How fast each peer takes part in a reduction: its limits and its median link."""
        middle = len(self.uplink_bytes_per_s) // 2
        medians = (sorted(row)[middle] for row in self.pair_bytes_per_s)
        return tuple(map(min, medians, self.uplink_bytes_per_s, self.downlink_bytes_per_s))

    @cached_property
    def farthest_ns(self) -> tuple[int, ...]:
        """Latency from each peer to the one that is farthest from it."""
        return tuple(map(max, self.latency_ns))


def link_tables(records: Sequence[PeerRecord], swarm: SwarmLinks, size_bytes: int) -> LinkTables:
    """The links between peers with these records, for boundary tensors of `size_bytes`."""
    latency, rate, pair = _measured(records, swarm)
    return LinkTables(
        uplink_bytes_per_s=tuple(limit(record.uplink_bytes_per_s) for record in records),
        downlink_bytes_per_s=tuple(limit(record.downlink_bytes_per_s) for record in records),
        latency_ns=latency,
        bytes_per_s=rate,
        transmit_ns=_transmit_ns(rate, size_bytes),
        pair_bytes_per_s=pair,
    )


def _measured(records: Sequence[PeerRecord], swarm: SwarmLinks) -> tuple[Matrix, Matrix, Matrix]:
    """(latency, rate of one flow, rate of the slower direction without shared limits)."""
    latency: list[tuple[int, ...]] = []
    raw: list[tuple[int, ...]] = []
    for sender in records:
        links = swarm.ways(sender, records)
        latency.append(tuple(round_trip_ns // 2 for round_trip_ns, _ in links))
        raw.append(tuple(bytes_per_s for _, bytes_per_s in links))
    downlinks = [limit(record.downlink_bytes_per_s) for record in records]
    rate = tuple(
        tuple(map(min, row, downlinks, repeat(limit(record.uplink_bytes_per_s))))
        for record, row in zip(records, raw, strict=True)
    )
    pair = tuple(
        tuple(map(min, row, column, repeat(UNLIMITED_BYTES_PER_S)))
        for row, column in zip(raw, zip(*raw, strict=True), strict=True)
    )
    return tuple(latency), rate, pair


def _transmit_ns(rate: Matrix, size_bytes: int) -> Matrix:
    """Time of one boundary tensor over each link; equal rates share one number."""
    known: dict[int, int] = {}
    for row in rate:
        for bytes_per_s in row:
            if bytes_per_s not in known:
                known[bytes_per_s] = MESSAGE_NS + duration_ns(size_bytes, bytes_per_s)
    return tuple(tuple(map(known.__getitem__, row)) for row in rate)


def duration_ns(size_bytes: int, bytes_per_s: int) -> int:
    """Time to send, rounded up."""
    return -(-size_bytes * 1_000_000_000 // bytes_per_s)
