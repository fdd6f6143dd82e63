"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.records import Intent
from p2p_dtfm.core.snapshot import Snapshot, ViewId
from p2p_dtfm.core.workload import STATE_COPIES, Workload

QUEUED_BYTES_LIMIT = 256 << 20
"""Of gradients that wait for one guardian; when more do, its holder stops feeding it."""

Peer = TypeVar("Peer", str, int)


def guarded_layers(
    plan: Plan | NoPlan, members: tuple[str, ...], needs: Mapping[int, int], room: Mapping[str, int]
) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Spares come first, since they have nothing else to do; each holder's layers go to one guardian,
    and holders are spread over the guardians in order. `needs`: bytes of a layer at its guardian;
    `room`: bytes that each member has left. Whom nobody has room to guard has no guardian.
    """
    if not isinstance(plan, Plan) or len(members) < 2:
        return {}
    layers: dict[str, list[int]] = {}
    for segment in plan.segments():
        if len(segment.holders) == 1:
            layers.setdefault(segment.holders[0], []).extend(segment.layers)
    wanted = {holder: sum(needs[layer] for layer in held) for holder, held in layers.items()}
    candidates = sorted(members, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    guardians = assigned(wanted, candidates, room)
    return {layer: guardian for holder, guardian in guardians.items() for layer in layers[holder]}


def assigned(
    wanted: Mapping[Peer, int], candidates: Sequence[Peer], room: Mapping[Peer, int]
) -> dict[Peer, Peer]:
    """The guardian of each holder, of those with room for the bytes that it wants guarded: the one
    with the fewest others, the first among equals."""
    load = dict.fromkeys(candidates, 0)
    left = dict(room)
    place = {peer: at for at, peer in enumerate(candidates)}
    chosen: dict[Peer, Peer] = {}
    for holder, size in wanted.items():
        able = [peer for peer in candidates if peer != holder and left[peer] >= size]
        if able:
            guardian = chosen[holder] = min(able, key=lambda peer: (load[peer], place[peer]))
            load[guardian] += 1
            left[guardian] -= size
    return chosen


def guards_in(snapshot: Snapshot, plan: Plan | NoPlan) -> dict[int, str]:
    """The guardians in a view; who leaves is none."""
    if not isinstance(plan, Plan):
        return {}
    staying = [record for record in snapshot.records if record.intent is not Intent.LEAVING]
    room = room_bytes(
        snapshot.workload, plan, {each.peer_id: each.device.memory_bytes for each in staying}
    )
    return guarded_layers(plan, tuple(room), guarding_bytes(snapshot.workload), room)


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
