"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.cost_model.cuts import (
    STATE_PARTS,
    CutPace,
    GuardedPair,
    has_room_for_cuts,
    lags,
    pace_of,
)
from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.cost_model.tables.stage_memory import StageMemory, stage_memory
from p2p_dtfm.core.cost_model.unmeasured import held_back
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import ACCELERATOR, Intent, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, STATE_COPIES, Workload

LEAST_ROOM_BYTES = 64 << 20
"""Every member guards so much, even where the plan takes all memory that the owner allows. Next to
the program itself it is little, and a small model needs no more."""
GUARDED_COPIES = STATE_COPIES + 2
"""Copies at a guardian: a layer's state, and the reduced gradients of the last step and of this
one. A guardian that lags has two copies of parameters and moments instead."""

QUEUED_BYTES_LIMIT = 256 << 20
"""Bytes of gradients that wait for one guardian; when more do, the holder stops feeding it. With
large layers more may wait (`queued_bytes_limit`)."""

Peer = TypeVar("Peer", str, int)
May = Callable[[Peer, int], bool]
"""`may(guardian, layer)`: whether the run leaves that layer to that member."""
Way = Callable[[Peer, Peer], tuple[int, int]]
"""`way(holder, guardian)`: bytes/s of one flow to the guardian, and the round trip in ns."""
States = Mapping[Peer, set[int]]
"""The layers of which each member has the state already."""


def alike(holder: object, guardian: object) -> tuple[int, int]:
    """A `Way` by which all ways are the same."""
    return 1_000_000_000, 0


def anybody(guardian: object, layer: int) -> bool:
    """A `May` by which anybody may guard any layer."""
    return True


def guarded_layers(
    plan: Plan | NoPlan,
    room_bytes: Mapping[str, int],
    cost_bytes: Callable[[int], int],
    way: Way[str] = alike,
    states: States[str] | None = None,
    may: May[str] = anybody,
) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Each holder's layers go to one guardian if one has room for them. A step waits until its
    gradients are with the guardians. So the member is chosen that has them first, beside what it
    gets from others; among equals spares come first, since they have nothing else to do. A member
    that has the `states` already comes first, unless it is twice as late. `room_bytes` is what each
    member has left, `cost_bytes(layer)` what guarding a layer takes. A layer that nobody has room
    for has no guardian.
    """
    if not isinstance(plan, Plan):
        return {}
    candidates = sorted(room_bytes, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    return assigned(_held_alone(plan), candidates, room_bytes, cost_bytes, way, states, may)


def assigned(
    alone: Mapping[Peer, list[int]],
    candidates: Sequence[Peer],
    room_bytes: Mapping[Peer, int],
    cost_bytes: Callable[[int], int],
    way: Way[Peer] = alike,
    states: States[Peer] | None = None,
    may: May[Peer] = anybody,
) -> dict[int, Peer]:
    """The guardian of each layer. `alone`: the layers that each holder alone holds. Among equals
    the earlier candidate is chosen."""
    left_bytes = dict(room_bytes)
    guardians: dict[int, Peer] = {}

    def ready_ns(holder: Peer, guardian: Peer, size_bytes: int) -> int:
        """When a guardian has the gradients, with those that it guards already. A gradient is one
        of the copies that `size_bytes` counts."""
        bytes_per_s, round_trip_ns = way(holder, guardian)
        size_bytes += room_bytes[guardian] - left_bytes[guardian]
        return round_trip_ns + duration_ns(size_bytes // GUARDED_COPIES, bytes_per_s)

    for holder, held in alone.items():
        sizes = list(map(cost_bytes, held))
        done = 0
        while done < len(held):
            size, layer = sizes[done], held[done]
            able = [
                p for p in candidates if left_bytes[p] >= size and p != holder and may(p, layer)
            ]
            if not able:
                done += 1
                continue
            needed_bytes = sum(sizes[done:])
            ready = [
                (left_bytes[peer] < needed_bytes, ready_ns(holder, peer, needed_bytes))
                for peer in able
            ]
            best = min(ready)
            if states is not None:
                layers = held[done:]
                having = [
                    when
                    for when, peer in zip(ready, able, strict=True)
                    if states.get(peer, set()).issuperset(layers) and when <= (best[0], 2 * best[1])
                ]
                best = min(having, default=best)
            guardian = able[ready.index(best)]
            while done < len(held) and left_bytes[guardian] >= sizes[done]:
                if not may(guardian, held[done]):
                    break
                left_bytes[guardian] -= sizes[done]
                guardians[held[done]] = guardian
                done += 1
    return guardians


def _held_alone(plan: Plan) -> dict[str, list[int]]:
    """The layers that each member holds and nobody else does."""
    alone: dict[str, list[int]] = {}
    for segment in plan.segments():
        if len(segment.holders) == 1:
            alone.setdefault(segment.holders[0], []).extend(segment.layers)
    return alone


def guards_in(snapshot: Snapshot, plan: Plan | NoPlan) -> dict[int, str]:
    """The guardians in a view. Members that leave, or whose links are unmeasured, are none."""
    if not isinstance(plan, Plan):
        return {}
    workload, waiting = snapshot.workload, held_back(snapshot) - set(plan.stage_holders())
    staying = [r for r in snapshot.records if r.intent is not Intent.LEAVING]
    staying = [record for record in staying if record.peer_id not in waiting]
    memory = stage_memory(workload)
    rooms = {record.peer_id: _room_bytes(record, plan, memory) for record in staying}
    records = {record.peer_id: record for record in snapshot.records}
    links = SwarmLinks(snapshot.records)

    def way(holder: str, guardian: str) -> tuple[int, int]:
        return links.flow(records[holder], records[guardian])

    def cost_bytes(layer: int) -> int:
        return guarded_bytes(workload, layer)

    states = None if snapshot.planned else snapshot.states()
    return guarded_layers(plan, rooms, cost_bytes, way, states, workload.may_have)


def guarded_at_once(snapshot: Snapshot, guards: Mapping[int, str]) -> frozenset[int]:
    """Layers whose guardian the first step of the view already waits for, if it waits for any.

    In a planned view these are all, since guardians have the states before it takes over. Where
    training begins they are all, since anybody can make the states. After a failure they are those
    whose guardian has the state.
    """
    if snapshot.planned or snapshot.step == 0:
        return frozenset(guards)
    states = snapshot.states()
    return frozenset(n for n, guardian in guards.items() if n in states.get(guardian, set()))


def guarded_pairs(
    snapshot: Snapshot, plan: Plan, guards: Mapping[int, str]
) -> tuple[GuardedPair, ...]:
    """Each holder with each of its guardians, and the way between them."""
    layers_of: dict[tuple[str, str], list[int]] = {}
    for layer, guardian in guards.items():
        layers_of.setdefault((plan.holders(layer)[0], guardian), []).append(layer)
    records = {record.peer_id: record for record in snapshot.records}
    workload, links = snapshot.workload, SwarmLinks(snapshot.records)
    return tuple(
        GuardedPair(
            holder,
            guardian,
            tuple(layers),
            sum(workload.guarded_bytes(workload.cost(layer)) for layer in layers),
            *links.flow(records[holder], records[guardian]),
        )
        for (holder, guardian), layers in layers_of.items()
    )


def cut_pace(snapshot: Snapshot, plan: Plan | NoPlan, guards: Mapping[int, str]) -> CutPace | None:
    """How often cuts are taken in a view; None where its guardians keep up with each step.

    All guardians of a view lag, or none does: layers that go back must go back to one step. Where
    there are several stage-holders, they keep copies of their own layers, too; if one has no room
    for that, no guardian lags.
    """
    if not isinstance(plan, Plan) or not guards:
        return None
    pairs = guarded_pairs(snapshot, plan, guards)
    if not lags((pair.wait_ns for pair in pairs), plan.predicted_step_ns):
        return None
    workload = snapshot.workload
    records = {record.peer_id: record for record in snapshot.records}
    own = {
        peer: FLOAT_BYTES * sum(workload.cost(n).parameter_count for n in plan.layers_of(peer))
        for peer in plan.stage_holders()
    }
    memory = stage_memory(workload)
    left = {peer: _room_bytes(records[peer], plan, memory) for peer in own}
    for layer, guardian in guards.items():
        if guardian in left:
            left[guardian] -= guarded_bytes(workload, layer)
    if not has_room_for_cuts(own, left):
        return None
    most_bytes = STATE_PARTS * max(own.values())
    return pace_of((pair.copy_ns for pair in pairs), most_bytes, plan.predicted_step_ns)


def guarded_bytes(workload: Workload, layer: int) -> int:
    """Memory that a layer takes at its guardian."""
    return GUARDED_COPIES * workload.guarded_bytes(workload.cost(layer))


def unguarded_layers(snapshot: Snapshot, plan: Plan | NoPlan) -> tuple[int, ...]:
    """Layers that one member holds and nobody guards, though there are other members that stay."""
    staying = [record for record in snapshot.records if record.intent is not Intent.LEAVING]
    if not isinstance(plan, Plan) or len(staying) < 2:
        return ()
    alone = [layer for layers in _held_alone(plan).values() for layer in layers]
    return tuple(sorted(set(alone) - guards_in(snapshot, plan).keys()))


def _room_bytes(record: PeerRecord, plan: Plan, memory: StageMemory) -> int:
    """What the plan leaves of the memory that a member offers.

    Guarded layers are in the processor's memory. An accelerator's stage is not.
    """
    stage = plan.stage_of(record.peer_id)
    used_bytes = 0
    if stage is not None and record.device.kind != ACCELERATOR:
        offered_bytes = record.device.memory_bytes
        used_bytes = memory.of(record.device.kind, len(plan.pipelines)).used_bytes(
            stage.first_layer, stage.end_layer, stage.in_flight, offered_bytes
        )
    return max(LEAST_ROOM_BYTES, record.device.guarding_bytes - used_bytes)


def queued_bytes_limit(step_bytes: int) -> int:
    """Bytes that may wait for one follower or guardian that gets `step_bytes` of gradients in each
    step. Two steps always may, or the follower could never begin."""
    return max(QUEUED_BYTES_LIMIT, 2 * step_bytes)
