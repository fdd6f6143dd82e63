"""The roster: the newest record of every peer. Merging is commutative, associative, idempotent."""

from collections.abc import Iterable

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member

Roster = dict[str, PeerRecord]


def newer(left: PeerRecord, right: PeerRecord) -> PeerRecord:
    """The one that counts. A peer that signed two records of one version settles on one of them."""
    assert left.peer_id == right.peer_id
    if left.version != right.version:
        return left if left.version > right.version else right
    return left if digest(left) >= digest(right) else right


def merge(roster: Roster, records: Iterable[PeerRecord]) -> Roster:
    """`roster` with the records that are newer than what it holds."""
    merged = dict(roster)
    for record in records:
        held = merged.get(record.peer_id)
        merged[record.peer_id] = record if held is None else newer(held, record)
    return merged


def is_news(roster: Roster, record: PeerRecord) -> bool:
    """Whether `record` would change the roster; a lower or equal sequence never does."""
    held = roster.get(record.peer_id)
    return held is None or record.version > held.version


def newest_lives(members: Iterable[Member]) -> frozenset[Member]:
    """Each peer in the newest of its lives that is named."""
    newest: dict[str, int] = {}
    for member in members:
        newest[member.peer_id] = max(newest.get(member.peer_id, 0), member.life)
    return frozenset(Member(peer_id, life) for peer_id, life in newest.items())
