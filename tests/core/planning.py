"""Snapshots to plan with: peers as short tuples of facts."""

from dataclasses import dataclass

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import (
    Device,
    Intent,
    LayerTiming,
    Link,
    PeerRecord,
    Reachability,
)
from p2p_dtfm.core.protocol.snapshot import GENESIS, Snapshot
from p2p_dtfm.core.protocol.workload import LayerCost, Workload

MEBIBYTE = 1 << 20
LAN = Link(round_trip_ns=200_000, bytes_per_s=1_000_000_000)


@dataclass(frozen=True)
class Peer:
    """`block_ns` is the time of a block, forward and backward together."""

    block_ns: int = 3_000_000
    memory_bytes: int = 1 << 40
    uplink_bytes_per_s: int = 0
    downlink_bytes_per_s: int = 0
    intent: Intent = Intent.TRAIN


def workload(
    blocks: int = 12,
    microbatches: int = 64,
    boundary_bytes: int = 1 << 20,
    block_parameters: int = 1 << 20,
    min_members: int = 1,
) -> Workload:
    """A model whose layers each take `16 * block_parameters` bytes. In a plan of one pipeline 4
    more are for sums, in other plans 8. A microbatch takes 8 MiB."""
    layer = LayerCost(block_parameters, 16 * block_parameters, 8 * MEBIBYTE, 1 << 30)
    return Workload(
        blocks, microbatches, 8, boundary_bytes, layer, layer, layer, min_members=min_members
    )


def name_of(number: int) -> str:
    return f"peer-{number:04d}"


def snapshot(
    peers: list[Peer],
    work: Workload | None = None,
    links: dict[tuple[int, int], Link] | None = None,
    link: Link | None = LAN,
    present: Plan | None = None,
) -> Snapshot:
    """Peers all linked by `link` (None: unmeasured), except for the directed pairs in `links`."""
    links = links or {}
    records = tuple(
        PeerRecord(
            peer_id=name_of(number),
            life=1,
            sequence=1,
            protocol_version=1,
            run_digest="run",
            device=_device(peer),
            uplink_bytes_per_s=peer.uplink_bytes_per_s,
            downlink_bytes_per_s=peer.downlink_bytes_per_s,
            links={
                name_of(other): found
                for other in range(len(peers))
                if other != number and (found := links.get((number, other), link)) is not None
            },
            addresses=(),
            reachability=Reachability.DIRECT,
            intent=peer.intent,
        )
        for number, peer in enumerate(peers)
    )
    return Snapshot("run", work or workload(), 1, GENESIS, True, records, (), (), 0, present)


def _device(peer: Peer) -> Device:
    whole = LayerTiming(peer.block_ns // 3, peer.block_ns - peer.block_ns // 3)
    tenth = LayerTiming(peer.block_ns // 30, peer.block_ns // 15)
    return Device("cpu", "test", peer.memory_bytes, tenth, whole, tenth)
