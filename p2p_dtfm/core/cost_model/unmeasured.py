"""Members that get no part in training yet, since nobody knows what their links carry.

A guess may be wrong by orders of magnitude: a peer with 5 Mbit/s once got all layers of a swarm,
whose steps then took minutes. So a newcomer is a spare that nobody waits for until its links are
measured, from either end, to each stage-holder (to `LINKS_ENOUGH` of them where there are many). In
a large swarm, in which nobody measures all links, those to any members count: they show what its
line carries. Where training begins all are alike, and nobody is held back.
"""

from collections import Counter

import msgspec

from p2p_dtfm.core.protocol.facts.brief_links import measured_links, short_name
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot

LINKS_ENOUGH = 8


def held_back(snapshot: Snapshot) -> frozenset[str]:
    """Members without a stage in the plan in force whose links to it are not measured."""
    if snapshot.present is None:
        return frozenset()
    stages = set(snapshot.present.stage_holders())
    holders = [record for record in snapshot.records if record.peer_id in stages]
    needed = min(len(holders), LINKS_ENOUGH)
    is_many = any(record.brief is not msgspec.UNSET for record in snapshot.records)
    names = Counter(short_name(it.peer_id) for it in snapshot.records) if is_many else Counter()
    return frozenset(
        record.peer_id
        for record in snapshot.records
        if record.intent is Intent.TRAIN
        and record.peer_id not in stages
        and _measured(record, holders, names) < needed
    )


def _measured(record: PeerRecord, holders: list[PeerRecord], names: Counter[bytes]) -> int:
    """How many links of a member are measured. `names` counts the members of each short name."""
    if record.brief is not msgspec.UNSET:
        return sum(names[name] for name in measured_links(record.brief))
    return sum(_is_measured(record, holder) for holder in holders)


def _is_measured(one: PeerRecord, other: PeerRecord) -> bool:
    return one.link_to(other.peer_id) is not None or other.link_to(one.peer_id) is not None
