"""Which of a peer's records, and of its lives, counts, in whatever order they come."""

from collections.abc import Iterable, Mapping

from p2p_dtfm.core.protocol.canonical import digest
from p2p_dtfm.core.protocol.records import PeerRecord
from p2p_dtfm.core.protocol.snapshot import Member


def newer(left: PeerRecord, right: PeerRecord) -> PeerRecord:
    """The record that counts. If a peer signed two of one version, all settle on the same one."""
    assert left.peer_id == right.peer_id
    if left.version != right.version:
        return left if left.version > right.version else right
    return left if digest(left) >= digest(right) else right


def newest_lives(members: Iterable[Member]) -> frozenset[Member]:
    """Each peer in the newest of its lives among `members`."""
    named = frozenset(members)
    if len({member.peer_id for member in named}) == len(named):
        return named
    newest: dict[str, int] = {}
    for member in named:
        newest[member.peer_id] = max(newest.get(member.peer_id, 0), member.life)
    return frozenset(Member(peer_id, life) for peer_id, life in newest.items())


def have_stayed(active: Iterable[Member], lives: Mapping[str, int]) -> frozenset[str]:
    """Those of the `active` that have begun no other life since, as far as was heard. A peer that
    leaves with a view says Active as well, and comes back knowing nothing of it."""
    return frozenset(it.peer_id for it in active if it.life >= lives.get(it.peer_id, 0))
