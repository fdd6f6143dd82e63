"""A view as the dashboard shows it: members on a map, pipelines, flows, and this peer's part."""

import re
from collections.abc import Sequence

import msgspec

from p2p_dtfm.core.cost_model.guardians import guards_in
from p2p_dtfm.core.planner.explain import (
    NO_FASTER,
    PeerExplanation,
    explain_peer,
    role_of_holder,
)
from p2p_dtfm.core.protocol.invited.line import open_line
from p2p_dtfm.core.protocol.names import distinct
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import PeerRecord, Reachability
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.recovery.view import View
from p2p_dtfm.daemon.dashboard.flows import flows
from p2p_dtfm.daemon.dashboard.peer_map import Points, place_peers
from p2p_dtfm.net.contacts.addresses import host_and_port, is_public, ways_to
from p2p_dtfm.web.state import MyPart, PeerFacts, PipelineFacts, ViewState

ADDRESS = re.compile(r"(?:/[A-Za-z0-9_.:-]+)+")
INVITING = 3
"""Members whose addresses an invitation holds."""


def view_state(
    view: View, spec: RunSpec, me: str, from_step: int, before: Points | None = None
) -> ViewState:
    """Everything that stays the same while `view` is in force. It takes tens of milliseconds, and
    for hundreds of peers a second or more."""
    snapshot, plan = view.snapshot, view.plan
    records = snapshot.records
    points = place_peers(records, before)
    numbers = {record.peer_id: number for number, record in enumerate(records)}
    names = distinct({record.peer_id: record.called for record in records})
    planned = plan if isinstance(plan, Plan) else None
    shown, are_left_out = flows(spec, snapshot, planned, me) if planned else ((), False)
    return ViewState(
        number=view.id.number,
        snapshot=view.id.snapshot,
        plan=plan.digest(),
        from_step=from_step,
        predicted_step_ns=planned.predicted_step_ns if planned else 0,
        no_plan=plan.reason if isinstance(plan, NoPlan) else "",
        me=numbers.get(me),
        peers=tuple(
            _peer(record, names[record.peer_id], planned, points[record.peer_id])
            for record in records
        ),
        pipelines=tuple(
            PipelineFacts(
                tuple(numbers[stage.peer_id] for stage in pipeline.stages),
                pipeline.microbatch_count,
            )
            for pipeline in (planned.pipelines if planned else ())
        ),
        flows=shown,
        are_flows_left_out=are_left_out,
        part=_part(snapshot, planned, me) if planned and me in numbers else None,
        join_line="" if spec.admission.is_invited else join_line(records, me, spec.digest()),
        own_join_line=""
        if spec.admission.is_invited
        else own_join_line(records, me, spec.digest()),
    )


def join_line(records: Sequence[PeerRecord], me: str, run_digest: str) -> str:
    """What a newcomer types: the run's digest, this peer's address and those of two others, direct
    ones first, packed in one word.

    Addresses are others' words: one with anything but the letters of an address is left out.
    """
    ranked = sorted(
        records, key=lambda it: (it.reachability is not Reachability.DIRECT, it.peer_id != me)
    )
    found = [best for record in ranked if (best := _best_address(record))]
    if not found:
        return ""
    return f"p2p-dtfm --invite {open_line(run_digest, found[:INVITING]).text()}"


def own_join_line(records: Sequence[PeerRecord], me: str, run_digest: str) -> str:
    """The same with no address but this peer's own, and only where anybody can call it: whoever
    reads the public page through a proxy learns no address of a home's own network."""
    mine = [
        msgspec.structs.replace(it, addresses=_public(it))
        for it in records
        if it.peer_id == me and it.reachability is Reachability.DIRECT
    ]
    return join_line(mine, me, run_digest)


def _public(record: PeerRecord) -> tuple[str, ...]:
    return tuple(address for address in _plain(record) if is_public(host_and_port(address)[0]))


def _plain(record: PeerRecord) -> list[str]:
    """Addresses that a shell takes as they are, and at which this very peer could be called. A line
    with another one in it would be refused whole."""
    plain = [address for address in record.addresses if ADDRESS.fullmatch(address)]
    suffix = f"/p2p/{record.peer_id}"
    return [at for at in ways_to(record.peer_id, plain) if at.endswith(suffix)]


def _best_address(record: PeerRecord) -> str:
    """An address that leads to the peer from elsewhere, if there is one."""
    plain = _plain(record)
    outside = [address for address in plain if not address.startswith(("/ip4/127.", "/ip6/::1/"))]
    return next(iter(outside or plain), "")


def points_of(state: ViewState) -> Points:
    """The map, for the next view to resemble."""
    return {peer.peer_id: (peer.x, peer.y) for peer in state.peers}


def _peer(
    record: PeerRecord, name: str, plan: Plan | None, point: tuple[float, float]
) -> PeerFacts:
    device = record.device
    facts = PeerFacts(
        peer_id=record.peer_id,
        name=name,
        device=f"{device.kind}, {device.name}",
        memory_bytes=device.memory_bytes,
        block_ns=device.block.forward_ns + device.block.backward_ns,
        intent=record.intent.value,
        reachability=record.reachability.value,
        uplink_bytes_per_s=record.uplink_bytes_per_s,
        downlink_bytes_per_s=record.downlink_bytes_per_s,
        x=round(point[0], 4),
        y=round(point[1], 4),
    )
    place = plan.place_of(record.peer_id) if plan else None
    if plan is None or place is None:
        return facts
    stage = plan.pipelines[place[0]].stages[place[1]]
    return msgspec.structs.replace(
        facts,
        pipeline=place[0],
        position=place[1],
        first_layer=stage.first_layer,
        end_layer=stage.end_layer,
        in_flight=stage.in_flight,
    )


def _part(snapshot: Snapshot, plan: Plan, me: str) -> MyPart:
    workload = snapshot.workload
    microbatches = sum(plan.pipelines[n].microbatch_count for n, _ in plan.places_of(me))
    share = len(plan.layers_of(me)) * microbatches
    share_of_all = share / (workload.layer_count * workload.microbatch_count)
    guards = guards_in(snapshot, plan)
    part = MyPart(
        role="",
        share=round(share_of_all, 4),
        step_ns=plan.predicted_step_ns,
        other_step_ns=None,
        guards=tuple(layer for layer, guardian in guards.items() if guardian == me),
    )
    if plan.stage_of(me) is not None:
        return msgspec.structs.replace(part, role=role_of_holder(snapshot, plan, me))
    explained = explain_peer(snapshot, plan, me)
    alternative = explained.alternative
    return msgspec.structs.replace(
        part,
        role=explained.role,
        other_step_ns=alternative.step_ns if alternative else None,
        why_spare=_why_spare(explained),
    )


def _why_spare(explained: PeerExplanation) -> str:
    """What there is to say beyond that all places make a step slower; empty if nothing."""
    if explained.role == NO_FASTER:
        return ""
    why = explained.role.partition(": ")[2]
    return f"{why[:1].upper()}{why[1:]}."
