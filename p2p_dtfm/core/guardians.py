"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.problem import MESSAGE_NS, duration_ns, flow_of
from p2p_dtfm.core.records import ACCELERATOR, Intent, PeerRecord
from p2p_dtfm.core.snapshot import Snapshot
from p2p_dtfm.core.unmeasured import held_back
from p2p_dtfm.core.workload import STATE_COPIES, Workload

LEAST_ROOM_BYTES = 64 << 20
"""Everybody guards so much, even where the plan takes all memory that the owner allows: next to the
program itself it is little, and it is all that a small model needs."""
GUARDED_COPIES = STATE_COPIES + 2
"""A layer's state, and the reduced gradients of the last step and of this one."""

QUEUED_BYTES_LIMIT = 256 << 20
"""Of gradients that wait for one guardian; when more do, its holder stops feeding it. Of large
layers more may (`queued_bytes_limit`)."""

Peer = TypeVar("Peer", str, int)
Way = Callable[[Peer, Peer], tuple[int, int]]
"""`way(holder, guardian)`: bytes/s of one flow to the guardian, and the round trip in ns."""
States = Mapping[Peer, set[int]]
"""Layers of which each member has the state already."""


def alike(holder: object, guardian: object) -> tuple[int, int]:
    """All ways are the same."""
    return 1_000_000_000, 0


def guarded_layers(
    plan: Plan | NoPlan,
    room_bytes: Mapping[str, int],
    cost_bytes: Callable[[int], int],
    way: Way[str] = alike,
    states: States[str] | None = None,
) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Each holder's layers go to one guardian if one has room for them. A step waits until its
    gradients are with the guardians, so it is the one that has them first, beside what it gets from
    others; of those alike spares come first, since they have nothing else to do. `room_bytes` is
    what each member has left, `cost_bytes(layer)` what guarding a layer takes. What nobody has room
    for has no guardian. Who has the `states` already comes first, unless it is twice as late.
    """
    if not isinstance(plan, Plan):
        return {}
    candidates = sorted(room_bytes, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    return assigned(_held_alone(plan), candidates, room_bytes, cost_bytes, way, states)


def assigned(
    alone: Mapping[Peer, list[int]],
    candidates: Sequence[Peer],
    room_bytes: Mapping[Peer, int],
    cost_bytes: Callable[[int], int],
    way: Way[Peer] = alike,
    states: States[Peer] | None = None,
) -> dict[int, Peer]:
    """The guardian of each layer. `alone`: what each holder alone holds; first candidates first."""
    left_bytes = dict(room_bytes)
    guardians: dict[int, Peer] = {}

    def ready_ns(holder: Peer, guardian: Peer, size_bytes: int) -> int:
        """With what it guards already, of which a gradient is one copy."""
        bytes_per_s, round_trip_ns = way(holder, guardian)
        size_bytes += room_bytes[guardian] - left_bytes[guardian]
        return round_trip_ns + duration_ns(size_bytes // GUARDED_COPIES, bytes_per_s)

    for holder, held in alone.items():
        layers = held
        while layers:
            needed_bytes = sum(map(cost_bytes, layers))
            able = [p for p in candidates if p != holder and left_bytes[p] >= cost_bytes(layers[0])]
            if not able:
                layers = layers[1:]
                continue
            ready = [
                (left_bytes[peer] < needed_bytes, ready_ns(holder, peer, needed_bytes))
                for peer in able
            ]
            best = min(ready)
            having = [
                when
                for when, peer in zip(ready, able, strict=True)
                if states is not None
                and states.get(peer, set()).issuperset(layers)
                and when <= (best[0], 2 * best[1])
            ]
            guardian = able[ready.index(min(having, default=best))]
            while layers and left_bytes[guardian] >= cost_bytes(layers[0]):
                left_bytes[guardian] -= cost_bytes(layers[0])
                guardians[layers[0]] = guardian
                layers = layers[1:]
    return guardians


def _held_alone(plan: Plan) -> dict[str, list[int]]:
    """The layers that each member holds and nobody else does."""
    alone: dict[str, list[int]] = {}
    for segment in plan.segments():
        if len(segment.holders) == 1:
            alone.setdefault(segment.holders[0], []).extend(segment.layers)
    return alone


def guards_in(snapshot: Snapshot, plan: Plan | NoPlan) -> dict[int, str]:
    """The guardians in a view; who leaves is none, nor is whose links are not measured yet."""
    if not isinstance(plan, Plan):
        return {}
    workload, waiting = snapshot.workload, held_back(snapshot) - set(plan.stage_holders())
    staying = [r for r in snapshot.records if r.intent is not Intent.LEAVING]
    staying = [record for record in staying if record.peer_id not in waiting]
    rooms = {record.peer_id: _room_bytes(record, plan, workload) for record in staying}
    records = {record.peer_id: record for record in snapshot.records}

    def way(holder: str, guardian: str) -> tuple[int, int]:
        return flow_of(records[holder], records[guardian])

    def cost_bytes(layer: int) -> int:
        return guarded_bytes(workload, layer)

    states = None if snapshot.planned else snapshot.states()
    return guarded_layers(plan, rooms, cost_bytes, way, states)


def guarded_at_once(
    snapshot: Snapshot, plan: Plan | NoPlan, guards: Mapping[int, str]
) -> frozenset[int]:
    """Layers for whose guardian the first step of the view waits already.

    In a planned view, since its guardians have the states before it takes over; where training
    begins, since anybody can make them; after a failure, where the guardian has them. For one that
    could not keep up nobody waits.
    """
    if not isinstance(plan, Plan):
        return frozenset()
    sent: dict[tuple[str, str], list[int]] = {}
    for layer, guardian in guards.items():
        sent.setdefault((plan.holders(layer)[0], guardian), []).append(layer)
    records = {record.peer_id: record for record in snapshot.records}
    has_all = snapshot.planned or snapshot.step == 0
    states, workload = snapshot.states(), snapshot.workload
    found: set[int] = set()
    for (holder, guardian), layers in sent.items():
        size_bytes = sum(workload.guarded_bytes(workload.cost(layer)) for layer in layers)
        bytes_per_s, _ = flow_of(records[holder], records[guardian])
        transfer_ns = MESSAGE_NS + duration_ns(size_bytes, bytes_per_s)
        if keeps_up(size_bytes, transfer_ns, plan.predicted_step_ns):
            found |= set(layers) if has_all else states.get(guardian, set()) & set(layers)
    return frozenset(found)


def guarded_bytes(workload: Workload, layer: int) -> int:
    """Memory that a layer takes at its guardian."""
    return GUARDED_COPIES * workload.guarded_bytes(workload.cost(layer))


def unguarded_layers(snapshot: Snapshot, plan: Plan | NoPlan) -> tuple[int, ...]:
    """Layers of which only one member has the state, though there are others that stay."""
    staying = [record for record in snapshot.records if record.intent is not Intent.LEAVING]
    if not isinstance(plan, Plan) or len(staying) < 2:
        return ()
    alone = [layer for layers in _held_alone(plan).values() for layer in layers]
    return tuple(sorted(set(alone) - guards_in(snapshot, plan).keys()))


def _room_bytes(record: PeerRecord, plan: Plan, workload: Workload) -> int:
    """What the plan leaves of the memory that a member offers.

    Guarded layers are in the processor's memory. An accelerator's stage is not; of its host's
    memory records say nothing, and it is taken to be no less than the accelerator's.
    """
    stage = plan.stage_of(record.peer_id)
    used_bytes = 0
    if stage is not None and record.device.kind != ACCELERATOR:
        costs = [workload.cost(layer) for layer in stage.layers]
        used_bytes = sum(c.state_bytes + stage.in_flight * c.saved_bytes for c in costs)
    return max(LEAST_ROOM_BYTES, record.device.memory_bytes - used_bytes)


def keeps_up(gradient_bytes: int, transfer_ns: int, step_ns: int) -> bool:
    """Whether a guardian ever gets in place, if nobody waits for it until then.

    It fetches a state of three times the gradient's size, then the first gradient, while gradients
    of further steps queue for it; when too many do, its holder stops feeding it.
    """
    steps = -(-STATE_COPIES * transfer_ns // max(1, step_ns))
    return steps * gradient_bytes <= queued_bytes_limit(gradient_bytes)


def queued_bytes_limit(step_bytes: int) -> int:
    """What may wait for one follower or guardian that gets `step_bytes` of gradients in each step:
    always two steps, or it could never begin."""
    return max(QUEUED_BYTES_LIMIT, 2 * step_bytes)
