"""How a seed begins: its machines and lines, who founds, and who comes then."""

from pathlib import Path

from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.seeds.run import with_named_ends
from p2p_dtfm.testbed.virtual.seeds.schedules.schedule import Schedule
from p2p_dtfm.testbed.virtual.seeds.surroundings.invited import by_invitation, line_of
from p2p_dtfm.testbed.virtual.swarm import HOURS, MEMORY_GIB, Swarm

SMALL_GIB = 0.7 / 1024
"""Half of the memory that a peer alone needs for the whole model."""
FOUNDED_WITHIN_S = 60.0

Stays = dict[str, object]
"""Settings of all daemons. Those that come back after the last step stay, too."""


async def begin(swarm: Swarm, schedule: Schedule, run: Path) -> None:
    """Starts all that begin the run. Peers that join later get a home."""
    stays: Stays = {"exit_when_done": False, "samples": schedule.writes_samples}
    if schedule.stays_resident:
        stays["hours"] = HOURS
    _surround(swarm, schedule, stays)
    founder = await _founded(swarm, schedule, _run_of(swarm, schedule, run), stays)
    met = _met(swarm)
    known = met or [swarm.address(founder)]
    if met and founder.daemon is not None:
        stays["run_digest"] = founder.daemon.run_digest
    if schedule.is_invited:
        stays |= line_of(founder, swarm.identity_of(founder.name), known[0])
    for name in schedule.begun[1:] + schedule.joiners:  # each is given all that begin before it
        room = _room_of(name, schedule)
        peer = swarm.peer(name, initial_peers=tuple(known), **stays, **room)
        if name in schedule.callable_first:
            known.append(swarm.address(peer))
    for name in schedule.begun[1:]:
        swarm.start(swarm.named(name))


def _surround(swarm: Swarm, schedule: Schedule, stays: Stays) -> None:
    links = swarm.network.links
    if schedule.is_small:
        swarm.memory_gib, links.are_near = SMALL_GIB, True
    links.are_narrow = schedule.is_narrow
    links.are_soon_measured = schedule.is_quick
    links.are_thin = schedule.is_crowd
    links.are_apart = schedule.lanes_are_apart
    if schedule.liars:
        swarm.are_equal = links.are_near = True
    swarm.stays_resident, swarm.are_slow = schedule.stays_resident, schedule.is_slow
    if schedule.behind:
        swarm.put_behind_routers(schedule.behind, str(schedule.faults), schedule.begun[0])
        stays["listen"] = ("/ip4/0.0.0.0/tcp/0",)


def _run_of(swarm: Swarm, schedule: Schedule, run: Path) -> Path:
    if schedule.is_invited:
        run = by_invitation(run, swarm.identity_of(schedule.begun[0]), swarm.folder)
    if schedule.is_private:
        named = [swarm.identity_of(name).peer_id for name in schedule.begun[:-1]]
        run = with_named_ends(run, named, swarm.folder)
    return run


async def _founded(swarm: Swarm, schedule: Schedule, run: Path, stays: Stays) -> Peer:
    founder = swarm.peer(
        schedule.begun[0],
        run=str(run),
        expect_peers=len(schedule.begun),
        initial_peers=tuple(_met(swarm)),
        **stays,
        **_room_of(schedule.begun[0], schedule),
    )
    swarm.start(founder)
    await swarm.until(lambda: founder.has_run, "the run is founded", FOUNDED_WITHIN_S)
    if schedule.is_slow:  # when started again, it expects nobody
        founder.settings = founder.settings.model_copy(update={"expect_peers": 1})
    return founder


def _met(swarm: Swarm) -> list[str]:
    """The meeting point's address, if there is one: then nobody can call the founder."""
    return [] if swarm.meeting_point is None else [swarm.meeting_point.address]


def _room_of(name: str, schedule: Schedule) -> dict[str, float]:
    """A peer's memory, where it has more than most."""
    return {"memory_gib": MEMORY_GIB} if name in schedule.roomy else {}
