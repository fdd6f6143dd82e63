"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.problem import duration_ns, flow_of
from p2p_dtfm.core.records import Intent
from p2p_dtfm.core.snapshot import Snapshot, ViewId
from p2p_dtfm.core.workload import STATE_COPIES, Workload

QUEUED_BYTES_LIMIT = 256 << 20
"""Of gradients that wait for one guardian; when more do, its holder stops feeding it."""

Peer = TypeVar("Peer", str, int)
Way = Callable[[Peer, Peer], tuple[int, int]]
"""`way(holder, guardian)`: round trip in ns, and bytes/s of one flow to the guardian."""


def guarded_layers(
    plan: Plan | NoPlan,
    members: tuple[str, ...],
    needs: Mapping[int, int],
    room: Mapping[str, int],
    way: Way[str],
) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Each holder's layers go to one guardian; of those alike spares come first, since they have
    nothing else to do. `needs`: bytes of a layer at its guardian; `room`: bytes that each member
    has left. Whom nobody has room to guard has no guardian.
    """
    if not isinstance(plan, Plan) or len(members) < 2:
        return {}
    layers: dict[str, list[int]] = {}
    for segment in plan.segments():
        if len(segment.holders) == 1:
            layers.setdefault(segment.holders[0], []).extend(segment.layers)
    wanted = {holder: sum(needs[layer] for layer in held) for holder, held in layers.items()}
    candidates = sorted(members, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    guardians = assigned(wanted, candidates, room, way)
    return {
        layer: guardians[peer] for peer in layers if peer in guardians for layer in layers[peer]
    }


def assigned(
    wanted: Mapping[Peer, int], candidates: Sequence[Peer], room: Mapping[Peer, int], way: Way[Peer]
) -> dict[Peer, Peer]:
    """The guardian of each holder, of those with room for the bytes that it wants guarded.

    A step waits until its gradients are with the guardians: it is the one that has them first,
    beside what it gets from others, and the first among equals. Who has most to give chooses first.
    """
    received = dict.fromkeys(candidates, 0)
    chosen: dict[Peer, Peer] = {}

    def ready_ns(holder: Peer, guardian: Peer) -> int:
        round_trip_ns, bytes_per_s = way(holder, guardian)
        size = (received[guardian] + wanted[holder]) // STATE_COPIES
        return round_trip_ns + duration_ns(size, bytes_per_s)

    for holder, size in sorted(wanted.items(), key=lambda item: -item[1]):
        able = [p for p in candidates if p != holder and room[p] >= received[p] + size]
        if able:
            guardian = chosen[holder] = min(able, key=lambda peer: ready_ns(holder, peer))
            received[guardian] += size
    return chosen


def guards_in(snapshot: Snapshot, plan: Plan | NoPlan) -> dict[int, str]:
    """The guardians in a view; who leaves is none."""
    if not isinstance(plan, Plan):
        return {}
    records = {record.peer_id: record for record in snapshot.records}
    memory = {
        peer: record.device.memory_bytes
        for peer, record in records.items()
        if record.intent is not Intent.LEAVING
    }
    room = room_bytes(snapshot.workload, plan, memory)

    def way(holder: str, guardian: str) -> tuple[int, int]:
        return flow_of(records[holder], records[guardian])

    return guarded_layers(plan, tuple(room), guarding_bytes(snapshot.workload), room, way)


def guarding_bytes(workload: Workload) -> dict[int, int]:
    """What each layer takes at its guardian: parameters, moments, and the gradient of a step."""
    return {
        layer: STATE_COPIES * workload.guarded_bytes(workload.cost(layer))
        for layer in range(workload.layer_count)
    }


def room_bytes(workload: Workload, plan: Plan, memory: Mapping[str, int]) -> dict[str, int]:
    """Of each peer's memory, what its own stage leaves; below 0 for one that must recompute."""
    left = dict(memory)
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        if stage.peer_id in left:
            costs = [workload.cost(layer) for layer in stage.layers]
            left[stage.peer_id] -= sum(
                cost.state_bytes + stage.in_flight * cost.saved_bytes for cost in costs
            )
    return left


def keeps_up(gradient_bytes: int, transfer_ns: int, step_ns: int) -> bool:
    """Whether a guardian ever gets in place, if nobody waits for it until then.

    It fetches a state of three times the gradient's size, then the first gradient, while gradients
    of further steps queue for it; when too many do, its holder stops feeding it.
    """
    steps = -(-STATE_COPIES * transfer_ns // max(1, step_ns))
    return steps * gradient_bytes <= QUEUED_BYTES_LIMIT


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
