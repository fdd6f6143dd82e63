"""What this machine would add to a swarm: the plan of what members publish, with and without it.

It is what an onlooker can know. Links are measured to some members, which let in any peer that
knocks. Other links are estimated where members say where they are. The rest are taken for as good
as the worst measured one.
"""

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from p2p_dtfm.core.planner.feasibility import too_small
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.facts.brief_links import BRIEF_FROM_MEMBERS, Link, brief
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    PeerRecord,
    Reachability,
)
from p2p_dtfm.core.protocol.snapshot import founding_snapshot
from p2p_dtfm.core.protocol.workload import workload_of
from p2p_dtfm.daemon.peers.facts.newcomer import Newcomer
from p2p_dtfm.daemon.peers.facts.own_place import OwnPlace
from p2p_dtfm.daemon.peers.facts.swarm_seen import Onlooker, SwarmSeen, looking_from, see
from p2p_dtfm.daemon.peers.wire import Knock, pack
from p2p_dtfm.net.errors import Refused, Unreachable
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.streams.probing import Probes

MEASURED_LIMIT = 8
CALL_DEADLINE_S = 5.0
PROBE_DEADLINE_S = 4.0
FIRST_PROBE_BYTES = 1 << 18


@dataclass(frozen=True)
class Worth:
    """Predicted tokens per second; `layers` are what this machine would hold."""

    before: float
    after: float
    layers: tuple[int, ...]
    members: int
    measured: int
    """Number of members to which the link was measured."""
    takes_part: bool = False
    """Whether a daemon of this machine is a member already. `members` then counts the others."""
    too_small: str = ""
    """Why no stage at all fits here; empty if one does."""


async def ask_worth(
    host: Host,
    initial_peers: Sequence[str],
    newcomer: Newcomer,
    run_digest: str = "",
    member: str = "",
) -> Worth | None:
    """What this machine would add, seen over a host that is connected to these peers. `member`: the
    daemon of this machine, if one runs. Raises `UserError`."""
    async with looking_from(host, initial_peers) as onlooker:
        seen = await see(onlooker, initial_peers, run_digest)
        if member in seen.facts:
            return await asyncio.to_thread(worth_of_member, seen, member)
        place = OwnPlace(host.peer_id)
        links = await measure_links(onlooker, seen, place)
        if not links:
            return None
        device = await asyncio.to_thread(newcomer.measure, seen.spec)
        me = host.peer_id
        return await asyncio.to_thread(worth_of, seen, me, newcomer, device, links, place)


async def measure_links(onlooker: Onlooker, seen: SwarmSeen, place: OwnPlace) -> dict[str, Link]:
    """Links to members that let themselves be measured, one after another."""
    probes = Probes(onlooker.host)
    probes.hear = place.hear
    found: dict[str, Link] = {}
    for presence in [it for it in seen.present if it.peer_id in seen.facts][:MEASURED_LIMIT]:
        peer_id = presence.peer_id
        with contextlib.suppress(Unreachable, Refused):
            await onlooker.host.connect(peer_id, list(presence.addresses), CALL_DEADLINE_S)
            knock = pack(0, Knock(seen.run_digest))
            await onlooker.control.call(peer_id, knock, CALL_DEADLINE_S)
            trip_ns = await probes.probe_round_trip(peer_id)
            rate = await probes.probe_bandwidth(peer_id, FIRST_PROBE_BYTES, PROBE_DEADLINE_S)
            found[peer_id] = Link(trip_ns, rate)
    return found


def worth_of(
    seen: SwarmSeen,
    me: str,
    newcomer: Newcomer,
    device: Device,
    links: Mapping[str, Link],
    place: OwnPlace,
) -> Worth | None:
    """The worth of a newcomer; None where nobody publishes anything, or nothing was measured."""
    records = seen.records
    if not records or not links:
        return None
    own = msgspec.structs.replace(
        _own_record(seen, me, device, links, place),
        uplink_bytes_per_s=newcomer.uplink_bytes_per_s,
        downlink_bytes_per_s=newcomer.downlink_bytes_per_s,
    )
    before, after = (_planned(seen, each) for each in (records, (*records, own)))
    layers = after.layers_of(me) if after is not None else ()
    return Worth(
        before=_rate(seen, before),
        after=_rate(seen, after),
        layers=tuple(layers),
        members=len(records),
        measured=len(links),
        too_small=too_small(workload_of(seen.spec), own),
    )


def worth_of_member(seen: SwarmSeen, me: str) -> Worth:
    """The worth of a member, from its record: the swarm without it, and with it."""
    others = tuple(record for record in seen.records if record.peer_id != me)
    before, after = _planned(seen, others) if others else None, _planned(seen, seen.records)
    return Worth(
        before=_rate(seen, before),
        after=_rate(seen, after),
        layers=tuple(after.layers_of(me)) if after is not None else (),
        members=len(others),
        measured=0,
        takes_part=True,
        too_small=too_small(workload_of(seen.spec), seen.facts[me].record),
    )


def _own_record(
    seen: SwarmSeen, me: str, device: Device, links: Mapping[str, Link], place: OwnPlace
) -> PeerRecord:
    is_brief = len(seen.records) + 1 >= BRIEF_FROM_MEMBERS
    worst = Link(
        max(link.round_trip_ns for link in links.values()),
        min(link.bytes_per_s for link in links.values()),
    )
    whole = {record.peer_id: links.get(record.peer_id, worst) for record in seen.records}
    return PeerRecord(
        peer_id=me,
        life=1,
        sequence=1,
        protocol_version=PROTOCOL_VERSION,
        run_digest=seen.run_digest,
        device=device,
        uplink_bytes_per_s=0,
        downlink_bytes_per_s=0,
        links={} if is_brief else whole,
        addresses=(),
        reachability=Reachability.UNKNOWN,
        intent=Intent.TRAIN,
        brief=brief(me, links, place.coordinate) if is_brief else msgspec.UNSET,
    )


def _planned(seen: SwarmSeen, records: Sequence[PeerRecord]) -> Plan | None:
    """The plan of these records, as if training began with them."""
    staying = [record for record in records if record.intent is not Intent.LEAVING]
    plan = compute_plan(founding_snapshot(seen.run_digest, workload_of(seen.spec), staying))
    return plan if isinstance(plan, Plan) else None


def _rate(seen: SwarmSeen, plan: Plan | None) -> float:
    return seen.spec.tokens_per_s(plan.predicted_step_ns) if plan is not None else 0.0


def words(worth: Worth) -> str:
    """The worth, in words for people."""
    links = f"links to {worth.measured} of {worth.members} members measured"
    if worth.takes_part:
        links = "its daemon takes part, as all members publish it"
    before, after = f"{worth.before:,.0f}", f"{worth.after:,.0f}"
    if not worth.layers:
        verb = "is" if worth.takes_part else "would be"
        why = worth.too_small or f"the swarm is as fast without it, {before} tokens/s"
        return f"{verb} a spare: {why} ({links})"
    runs = [
        (group[0], group[-1])
        for _, each in itertools.groupby(
            enumerate(worth.layers), lambda numbered: numbered[1] - numbered[0]
        )
        if (group := [layer for _, layer in each])
    ]
    held = ", ".join(f"{first}-{last}" for first, last in runs)
    verb = "adds" if worth.takes_part else "would add"
    return (
        f"{verb} {worth.after - worth.before:,.0f} tokens/s: from {before} to {after}, "
        f"with layers {held} ({links})"
    )
