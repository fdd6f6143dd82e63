"""Guardians: a layer with one holder is followed by another member, so that no crash loses it."""

from p2p_dtfm.core.plan import NoPlan, Plan
from p2p_dtfm.core.records import Intent
from p2p_dtfm.core.snapshot import Snapshot, ViewId


def guarded_layers(plan: Plan | NoPlan, members: tuple[str, ...]) -> dict[int, str]:
    """The guardian of each layer that a single member holds: a pure function of the view.

    Spares come first, since they have nothing else to do; each holder's layers go to one guardian,
    and holders are spread over the guardians in order.
    """
    if not isinstance(plan, Plan) or len(members) < 2:
        return {}
    candidates = sorted(members, key=lambda peer: (plan.stage_of(peer) is not None, peer))
    guardians: dict[int, str] = {}
    chosen: dict[str, str] = {}
    for segment in plan.segments():
        if len(segment.holders) > 1:
            continue
        holder = segment.holders[0]
        if holder not in chosen:
            load = {peer: list(chosen.values()).count(peer) for peer in candidates}
            others = [peer for peer in candidates if peer != holder]
            chosen[holder] = min(others, key=lambda peer: (load[peer], candidates.index(peer)))
        guardians |= {layer: chosen[holder] for layer in segment.layers}
    return guardians


def guards_in(snapshot: Snapshot, plan: Plan | NoPlan) -> dict[int, str]:
    """The guardians in a view; who leaves is none."""
    staying = (record for record in snapshot.records if record.intent is not Intent.LEAVING)
    return guarded_layers(plan, tuple(record.peer_id for record in staying))


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
