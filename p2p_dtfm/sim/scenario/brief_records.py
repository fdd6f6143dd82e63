"""Records of a scenario's peers as a large swarm has them: some links, and a place for the rest."""

import msgspec

from p2p_dtfm.core.cost_model.links.coordinates import Vivaldi
from p2p_dtfm.core.protocol.facts.brief_links import BRIEF_FROM_MEMBERS, Coordinate, brief
from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot

ROUNDS = 8
"""How often each peer hears from those that it has measured, and from as many others."""
HEARD_IN_A_ROUND = 32


def with_brief_records(snapshot: Snapshot, least_members: int = BRIEF_FROM_MEMBERS) -> Snapshot:
    """The same peers with bounded records, where there are at least `least_members` of them."""
    if len(snapshot.records) < least_members:
        return snapshot
    return msgspec.structs.replace(snapshot, records=tuple(brief_records(snapshot.records)))


def brief_records(records: tuple[PeerRecord, ...], seed: int = 1) -> list[PeerRecord]:
    """What peers that have measured all of their links would say of them."""
    places = _places(records, seed)
    return [
        msgspec.structs.replace(
            record, links={}, brief=brief(record.peer_id, record.links, places[record.peer_id])
        )
        for record in records
    ]


def _places(records: tuple[PeerRecord, ...], seed: int) -> dict[str, Coordinate]:
    """Where each peer finds itself, after so many round trips to others drawn by chance."""
    prng = Prng(seed)
    peers = {record.peer_id: Vivaldi(record.peer_id) for record in records}
    for _ in range(ROUNDS):
        for record in records:
            known = sorted(record.links)
            for _ in range(min(HEARD_IN_A_ROUND, len(known))):
                other = known[prng.below(len(known))]
                link = record.links[other]
                peers[record.peer_id].observe(peers[other].coordinate, link.round_trip_ns)
    return {peer_id: peer.coordinate for peer_id, peer in peers.items()}
