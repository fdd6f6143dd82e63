"""Daemons in virtual time that begin together, and their state."""

from collections.abc import Callable, Sequence
from pathlib import Path

from p2p_dtfm.core.consensus.agreement import Agreement
from p2p_dtfm.daemon.node.participation.participant import Participant
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.swarm import Swarm


async def begun(swarm: Swarm, run: Path, names: str, **settings: object) -> list[Peer]:
    """Start the founder first. All machines are equal, and near one another."""
    swarm.are_equal = swarm.network.links.are_near = True
    first = swarm.peer(names[0], run=str(run), expect_peers=len(names), **settings)
    known = (swarm.address(first),)
    others = [swarm.peer(it, initial_peers=known, **settings) for it in names[1:]]
    swarm.start(first)
    await swarm.until(lambda: first.has_run, "the run is founded", 60)
    for peer in others:
        swarm.start(peer)
    return [first, *others]


def participant_of(peer: Peer) -> Participant:
    assert peer.daemon is not None and peer.daemon.status_api is not None
    assert peer.daemon.status_api.participant is not None
    return peer.daemon.status_api.participant


def agreement_of(peer: Peer) -> Agreement:
    return participant_of(peer).membership.agreement


def are_in_views_of(peers: Sequence[Peer], count: int) -> Callable[[], bool]:
    """Whether each peer is in a view of so many members."""

    def are() -> bool:
        views = [agreement_of(peer).view for peer in peers]
        return all(view is not None and len(view.members) == count for view in views)

    return are
