"""How a run begins where some are behind routers: where else all meet, and by what it is named."""

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.swarm import Swarm

ANYWHERE = "/ip4/0.0.0.0/tcp/0"


def settings_behind_routers(swarm: Swarm, schedule: Schedule) -> dict[str, object]:
    """Of all daemons; before there is one. Nothing where nobody is behind a router."""
    if not schedule.behind:
        return {}
    swarm.put_behind_routers(schedule.behind, str(schedule.faults), schedule.begun[0])
    return {"listen": (ANYWHERE,)}


def founders_contacts(swarm: Swarm) -> tuple[str, ...]:
    """Whom the founder calls first."""
    return () if swarm.meeting_point is None else (swarm.meeting_point.address,)


def first_addresses(swarm: Swarm, founder: Peer) -> list[str]:
    """Whom all others call first."""
    return list(founders_contacts(swarm)) or [swarm.address(founder)]


def run_by_name(swarm: Swarm, founder: Peer) -> dict[str, object]:
    """Of whoever joins: where all meet nobody says which run is trained."""
    if swarm.meeting_point is None or founder.daemon is None:
        return {}
    return {"run_digest": founder.daemon.run_digest}
