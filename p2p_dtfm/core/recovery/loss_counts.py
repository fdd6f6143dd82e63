"""For how many microbatches of a step each peer counts the loss, as its Prepared must say."""

from p2p_dtfm.core.commit.step_terms import has_head
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.recovery.partial_replay import PartialReplay, whole_step


def loss_counts(plan: Plan, replay: PartialReplay | None = None) -> dict[str, int]:
    """Microbatches by peer with the head. `replay` is the rest of a step that failed before."""
    counts = {}
    for peer_id in plan.stage_holders():
        if has_head(plan, peer_id):
            mine = replay.stage(plan, peer_id) if replay is not None else whole_step(plan, peer_id)
            counts[peer_id] = len(mine.microbatches) if mine is not None else 0
    return counts
