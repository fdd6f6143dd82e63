"""The peers with which a plan has a peer exchange tensors."""

from p2p_dtfm.core.protocol.plan import NoPlan, Plan


def plan_neighbours(plan: Plan | NoPlan, peer_id: str) -> frozenset[str]:
    """The peers of the stages before and after its own, and those that hold the same layers in
    other pipelines."""
    if not isinstance(plan, Plan):
        return frozenset()
    found: set[str] = set()
    layers: set[int] = set()
    for pipeline in plan.pipelines:
        names = [stage.peer_id for stage in pipeline.stages]
        if peer_id in names:
            at = names.index(peer_id)
            found |= set(names[max(0, at - 1) : at + 2])
            layers |= set(pipeline.stages[at].layers)
    for pipeline in plan.pipelines:
        found |= {it.peer_id for it in pipeline.stages if layers & set(it.layers)}
    return frozenset(found - {peer_id})
