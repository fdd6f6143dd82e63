"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.problem import duration_ns, flow_of
from p2p_dtfm.core.records import ACCELERATOR, Intent, PeerRecord
from p2p_dtfm.core.snapshot import Snapshot, ViewId
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


def alike(holder: object, guardian: object) -> tuple[int, int]:
    """All ways are the same."""
    return 1_000_000_000, 0


def guarded_layers(
    plan: Plan | NoPlan,
    room_bytes: Mapping[str, int],
    cost_bytes: Callable[[int], int],
    way: Way[str] = alike,
) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Each holder's layers go to one guardian if one has room for them. A step waits until its
    gradients are with the guardians, so it is the one that has them first, beside what it gets from
    others; of those alike spares come first, since they have nothing else to do. `room_bytes` is
    what each member has left, `cost_bytes(layer)` what guarding a layer takes. What nobody has room
    for has no guardian.
    """
    if not isinstance(plan, Plan):
        return {}
    candidates = sorted(room_bytes, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    return assigned(_held_alone(plan), candidates, room_bytes, cost_bytes, way)


def assigned(
    alone: Mapping[Peer, list[int]],
    candidates: Sequence[Peer],
    room_bytes: Mapping[Peer, int],
    cost_bytes: Callable[[int], int],
    way: Way[Peer] = alike,
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
            guardian = able[ready.index(min(ready))]
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
    """The guardians in a view; who leaves is none."""
    if not isinstance(plan, Plan):
        return {}
    workload = snapshot.workload
    staying = [record for record in snapshot.records if record.intent is not Intent.LEAVING]
    rooms = {record.peer_id: _room_bytes(record, plan, workload) for record in staying}
    records = {record.peer_id: record for record in snapshot.records}

    def way(holder: str, guardian: str) -> tuple[int, int]:
        return flow_of(records[holder], records[guardian])

    return guarded_layers(plan, rooms, lambda layer: guarded_bytes(workload, layer), way)


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


class Receipts:
    """A holder's memory of which guardians are in place and what they have received.

    A guardian counts from its first receipt on; until then nobody waits for it, so that a new view
    is not held up by the transfer of its guardians' states.
    """

    def __init__(self, view: ViewId, guards: dict[int, str]) -> None:
        """`guards`: the guardian of each layer of which this peer is the only holder."""
        self.view = view
        self._guards = guards
        self._received: dict[int, int] = {}

    def receipt(self, sender: str, view: ViewId, step: int, layers: tuple[int, ...]) -> None:
        """`sender` has the states of `layers` at `step` and the reduced gradients of `step`."""
        for layer in layers if view == self.view else ():
            if self._guards.get(layer) == sender:
                self._received[layer] = max(step, self._received.get(layer, -1))

    def begins_again(self, guardian: str) -> None:
        """It asks for states anew: nobody waits for it until its next receipt."""
        for layer, of in self._guards.items():
            if of == guardian:
                self._received.pop(layer, None)

    def received_all_of(self, guardian: str) -> bool:
        """Whether every layer that this guardian guards here has a receipt."""
        return all(layer in self._received for layer, of in self._guards.items() if of == guardian)

    def waits_for(self, step: int) -> tuple[int, ...]:
        """Layers whose guardian is in place but has no reduced gradient of `step` yet.

        While there are any, Prepared for `step` must not be said.
        """
        return tuple(sorted(layer for layer, last in self._received.items() if last < step))
