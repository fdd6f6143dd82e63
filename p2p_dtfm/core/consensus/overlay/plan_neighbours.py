"""With whom a member of a swarm of many has to do by the plan."""

from p2p_dtfm.core.protocol.plan import NoPlan, Plan

NEXT_PIPELINES = 4
"""Who holds the same layers in so many pipelines before and after one's own. All who add up their
gradients wait for one another, and with hundreds each would listen to hundreds; it is enough that
some of those that wait for a peer listen to it."""


def plan_neighbours(plan: Plan | NoPlan, peer_id: str) -> frozenset[str]:
    """The stages before and after its own, and who holds the same layers in the next pipelines.
    Who is one's neighbour has one as its own."""
    if not isinstance(plan, Plan):
        return frozenset()
    found: set[str] = set()
    for own, place in plan.places_of(peer_id):
        names = [stage.peer_id for stage in plan.pipelines[own].stages]
        found |= set(names[max(0, place - 1) : place + 2])
        layers = set(plan.pipelines[own].stages[place].layers)
        for number in _around(own, len(plan.pipelines)):
            found |= {it.peer_id for it in plan.pipelines[number].stages if layers & set(it.layers)}
    return frozenset(found - {peer_id})


def _around(number: int, count: int) -> set[int]:
    """In a ring."""
    return {(number + way) % count for way in range(-NEXT_PIPELINES, NEXT_PIPELINES + 1)}
