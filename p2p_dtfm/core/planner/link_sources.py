"""Over which links a plan sends, and whether their rates are measured, estimated or guessed."""

import itertools
from collections import Counter

from p2p_dtfm.core.cost_model.links.swarm_links import SwarmLinks
from p2p_dtfm.core.protocol.plan import Plan

PAIRS_LIMIT = 100_000
"""Where a segment has more pairs of holders, only neighbours in the list of holders count."""


def links_in(plan: Plan) -> set[tuple[str, str]]:
    """(from, to): between stages, both ways, and between holders of a segment."""
    found: set[tuple[str, str]] = set()
    for pipeline in plan.pipelines:
        for one, other in itertools.pairwise(stage.peer_id for stage in pipeline.stages):
            found |= {(one, other), (other, one)}
    for segment in plan.segments():
        holders = sorted(segment.holders)
        if len(holders) ** 2 <= PAIRS_LIMIT:
            found.update(itertools.permutations(holders, 2))
        else:
            found.update(itertools.pairwise([*holders, holders[0]]))
    return {(one, other) for one, other in found if one != other}


def link_sources(plan: Plan, links: SwarmLinks) -> dict[str, int]:
    """How many of the plan's links are measured, estimated or guessed."""
    counts = Counter(links.source(*ends) for ends in sorted(links_in(plan)))
    return {source.value: count for source, count in sorted(counts.items())}
