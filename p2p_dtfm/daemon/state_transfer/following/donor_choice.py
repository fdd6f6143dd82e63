"""Which members have a layer's state that a view needs somewhere else."""

from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.recovery.view import View


def donors_of(view: View, layer: int, me: str, taken_over: bool = False) -> list[str]:
    """The members that have a layer's state from which `view` goes on, best first.

    For a planned view these are the holders of the view before it, first those that stay. Once it
    has taken over, its own holders have the state as well. A peer that goes with an unplanned view
    has nothing that its members have not.
    """
    snapshot, plan = view.snapshot, view.plan
    if snapshot.planned and snapshot.present is not None:
        present, own = snapshot.present.holders(layer), holders_in(plan, layer)
        staying = [peer for peer in present if peer in own]
        holders = dict.fromkeys((*staying, *present, *(own if taken_over else ())))
        return [peer for peer in holders if peer != me]
    versions = {item.peer_id: item.version for item in snapshot.held if item.layer == layer}
    newest = max(versions.values(), default=-1)
    newest_holders = [peer for peer, version in versions.items() if version == newest]
    return sorted(peer for peer in newest_holders if peer in view.member_ids and peer != me)


def holders_in(plan: Plan | NoPlan, layer: int) -> tuple[str, ...]:
    """Who holds a layer by a plan, if there is one."""
    return plan.holders(layer) if isinstance(plan, Plan) else ()


def guarded_from(view: View, layer: int, me: str) -> list[str]:
    """The members that the guardian of a layer follows: those that hold it in the view itself."""
    assert isinstance(view.plan, Plan)
    return [peer for peer in view.plan.holders(layer) if peer != me]
