"""A peer leaves in two views: first it gives up its place, then, when others hold that, it goes.

In the first view the leaver is a member without a stage, still watched and asked for its states.
The first step that commits there shows that every other member has what its own place needs. So a
failure in between finds the states at a member. `docs/decisions/0015-who-leaves-goes-last.md`.
"""

from collections.abc import Collection, Iterable, Sequence

from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import HeldLayer, Snapshot


def staying(
    records: Sequence[PeerRecord],
    planned: bool,
    present: Plan | None,
    held: Collection[HeldLayer],
    is_anybody_absent: bool,
) -> list[PeerRecord]:
    """The records of the next view's members: without leavers, unless they still have something.

    In a planned view change that is a stage of the `present` plan. In an unplanned one, while steps
    happen, it is any layer at the newest version (`held`): others that have it may fail before its
    next holders get it. Where no steps happen it is a layer that nobody who stays has as new. If
    all leave, nobody needs anything, unless somebody failed, who may come back.
    """
    leaving = leavers(records)
    if len(leaving) == len(records) and not is_anybody_absent:
        return []
    if planned:
        places = {peer for peer in leaving if present is not None and present.stage_of(peer)}
    elif present is not None:
        places = {peer for peers in newest_holders(held).values() for peer in peers}
    else:
        places = set(last_holders(held, leaving))
    return [r for r in records if r.peer_id not in leaving or r.peer_id in places]


def leavers(records: Iterable[PeerRecord]) -> frozenset[str]:
    """Peers that want to leave."""
    return frozenset(r.peer_id for r in records if r.intent is Intent.LEAVING)


def newest_holders(held: Iterable[HeldLayer]) -> dict[int, frozenset[str]]:
    """By layer: who has its newest version."""
    newest: dict[int, tuple[int, set[str]]] = {}
    for item in held:
        version, peers = newest.get(item.layer, (-1, set()))
        if item.version > version:
            newest[item.layer] = item.version, {item.peer_id}
        elif item.version == version:
            peers.add(item.peer_id)
    return {layer: frozenset(peers) for layer, (_, peers) in newest.items()}


def last_holders(held: Iterable[HeldLayer], leaving: frozenset[str]) -> frozenset[str]:
    """Those of the `leaving` that have a layer newer than anybody who stays."""
    ends = [peers for peers in newest_holders(held).values() if peers <= leaving]
    return frozenset(peer for peers in ends for peer in peers)


def is_waited_for(peer_id: str, snapshot: Snapshot, has_plan: bool) -> bool:
    """Whether a leaver had better stay: no steps happen, and nobody who stays has its states. The
    view's record of the leaver may be older than its wish to leave. If all want to leave, nobody
    waits for anybody."""
    leaving = leavers(snapshot.records) | {peer_id}
    if len(snapshot.records) > 1 and leaving >= {record.peer_id for record in snapshot.records}:
        return False
    return not has_plan and peer_id in last_holders(snapshot.held, leaving)
