"""Leaves out peers that add less to a swarm's speed than the run asks (`limits.least_gain`).

A peer that adds little can cost much: it is one more that must not fall silent, and one more to
wait for in every view. Peers with the least work are tried first. A pipeline of which nobody can be
left out alone goes as a whole, if it adds less than its peers should together. A peer that already
has a stage stays while it adds half of that: otherwise noise would move it in and out.
"""

from collections.abc import Container

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel

MILLION = 1_000_000
MOST_TRIED = 256
"""Peers that are tried, those with the least work first: each costs a placement's worth of work."""


def without_idlers(
    model: StepModel, cost: PlacementCost, least_gain_ppm: int, settled: Container[int] = ()
) -> PlacementCost:
    """The placement without peers that make the swarm faster by less than so many millionths.
    `settled` are the peers with a stage in the plan in force."""
    if not least_gain_ppm:
        return cost
    for peer in _by_work(model, cost)[:MOST_TRIED]:
        without = _without(model, cost, peer, peer in settled)
        if without is None:
            continue
        gone = cost.stage_count - without.stage_count
        asked = least_gain_ppm * gone // (2 if peer in settled else 1)
        step_ns = model.refined(cost).step_ns  # both by the same timing
        if (model.refined(without).step_ns - step_ns) * MILLION < asked * step_ns:
            cost = without
    return cost


def _by_work(model: StepModel, cost: PlacementCost) -> list[int]:
    """The peers, by how many layers times microbatches they compute in a step; the least first."""
    work = {
        peer: count * (pipeline.cuts[at + 1] - pipeline.cuts[at])
        for peers, pipeline, count in zip(
            cost.placement, cost.pipelines, cost.microbatches, strict=True
        )
        for at, peer in enumerate(peers)
    }
    return sorted(work, key=lambda peer: (work[peer], model.problem.peer_ids[peer]))


def _without(
    model: StepModel, cost: PlacementCost, peer: int, is_settled: bool
) -> PlacementCost | None:
    """The placement without this peer, or else without its pipeline. The other pipelines stay as
    they are cut.

    A settled peer goes only with its pipeline, so that nobody gets other layers for it.
    """
    number = next((n for n, peers in enumerate(cost.placement) if peer in peers), None)
    if number is None:
        return None
    peers = tuple(p for p in cost.placement[number] if p != peer)
    if peers and not is_settled:
        placement: Placement = (*cost.placement[:number], peers, *cost.placement[number + 1 :])
        timed, _ = model.pipelines_in(len(placement)).cost(peers)
        if timed is not None:
            pipelines = [*cost.pipelines[:number], timed, *cost.pipelines[number + 1 :]]
            return model.combine(placement, pipelines, None)
    others = cost.placement[:number] + cost.placement[number + 1 :]
    if not others:
        return None
    return model.combine(others, [*cost.pipelines[:number], *cost.pipelines[number + 1 :]], None)
