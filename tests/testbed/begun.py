"""Daemons in virtual time that begin together."""

from pathlib import Path

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.swarm import Swarm


async def begun(swarm: Swarm, run: Path, names: str) -> list[Peer]:
    """The founder first; machines are equal, and near one another."""
    swarm.are_equal = swarm.network.links.are_near = True
    first = swarm.peer(names[0], run=str(run), expect_peers=len(names))
    others = [swarm.peer(it, initial_peers=(swarm.address(first),)) for it in names[1:]]
    swarm.start(first)
    await swarm.until(lambda: first.has_run, "the run is founded", 60)
    for peer in others:
        swarm.start(peer)
    return [first, *others]
