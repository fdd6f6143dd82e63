"""Who leaves goes in two views: first it gives up its place, then, when others hold it, it goes.

In the first view it is a member without a stage, still watched and asked for its states; the first
step that commits in it shows that every other member has what its place needs. So a failure in
between finds the states at a member. `docs/decisions/0015-who-leaves-goes-last.md`.
"""

from collections.abc import Iterable, Sequence

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.records import Intent, PeerRecord
from p2p_dtfm.core.snapshot import HeldLayer, Snapshot


def staying(
    records: Sequence[PeerRecord],
    planned: bool,
    present: Plan | None,
    held: Iterable[HeldLayer],
) -> list[PeerRecord]:
    """Those that are members of the next view: without who leaves, unless it still has something.

    In a planned view change that is a stage of the `present` plan, in an unplanned one a layer
    that nobody else holds at a version as new (`held`). Where all leave nobody needs anything.
    """
    if all(record.intent is Intent.LEAVING for record in records):
        return []
    alone = frozenset() if planned else only_holders(held)

    def is_needed(peer_id: str) -> bool:
        if planned:
            return present is not None and present.stage_of(peer_id) is not None
        return peer_id in alone

    return [r for r in records if r.intent is not Intent.LEAVING or is_needed(r.peer_id)]


def only_holders(held: Iterable[HeldLayer]) -> frozenset[str]:
    """Peers that alone have the newest version of some layer."""
    newest: dict[int, tuple[int, set[str]]] = {}
    for item in held:
        version, peers = newest.get(item.layer, (-1, set()))
        if item.version > version:
            newest[item.layer] = item.version, {item.peer_id}
        elif item.version == version:
            peers.add(item.peer_id)
    return frozenset(next(iter(peers)) for _, peers in newest.values() if len(peers) == 1)


def is_waited_for(peer_id: str, snapshot: Snapshot, has_plan: bool) -> bool:
    """Whether a leaver had better stay: no steps happen, and it has the only copy of a layer."""
    return not has_plan and peer_id in only_holders(snapshot.held)
