"""Of how many microbatches each peer counts the loss in a step, as its Prepared must say."""

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.redo import Redo, whole_step
from p2p_dtfm.core.step_terms import has_head


def loss_counts(plan: Plan, redo: Redo | None = None) -> dict[str, int]:
    """By peer with the head; `redo` is what is left of a step that has failed before."""
    counts = {}
    for peer_id in plan.stage_holders():
        if has_head(plan, peer_id):
            mine = redo.stage(plan, peer_id) if redo is not None else whole_step(plan, peer_id)
            counts[peer_id] = len(mine.microbatches) if mine is not None else 0
    return counts
