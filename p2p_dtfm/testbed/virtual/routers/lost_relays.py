"""The peer that relays for the most others, and how they lose it."""

from collections import Counter
from dataclasses import replace

from p2p_dtfm.testbed.virtual.routers.meeting_point import NAME
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Fault
from p2p_dtfm.testbed.virtual.swarm import Swarm

WAYS_TO_GO = ("kill", "leave", "pause", "partition")
NO_MEETING_POINT = "no meeting point"


def busiest_relay(swarm: Swarm) -> str | None:
    """The name of the peer that relays the most connections now, and then the most that are
    possible; None: nobody relays any."""
    if swarm.network.ways_in is None:
        return None
    names = {peer.peer_id: peer.name for peer in swarm.peers if peer.is_running}
    if swarm.meeting_point is not None and swarm.meeting_point.is_there:
        names[swarm.meeting_point.peer_id] = NAME
    circuits = swarm.network.ways_in.circuits_by_relay()
    taken = Counter(relay for peer in swarm.peers for relay in peer.relays())
    much = {name: (circuits[it], taken[it]) for it, name in names.items()}
    relaying = [name for name in much if any(much[name])]
    return max(sorted(relaying), key=lambda name: much[name], default=None)


def loss_of_relay(swarm: Swarm, fault: Fault) -> Fault | None:
    """The fault that is done to the busiest relay now."""
    name = busiest_relay(swarm)
    if name is None:
        return None
    kind = WAYS_TO_GO[int(fault.draw * len(WAYS_TO_GO))]
    return replace(fault, kind=NO_MEETING_POINT if name == NAME else kind, whom=(name,))


def lose_meeting_point(swarm: Swarm) -> bool:
    point = swarm.meeting_point
    may = point is not None and point.is_there
    if may and point is not None:
        point.kill()
    return may


def bring_back_meeting_point(swarm: Swarm) -> None:
    """Starts the meeting point again, at its old address."""
    if swarm.meeting_point is not None and not swarm.meeting_point.is_there:
        swarm.meeting_point.start()
