"""Plans to compare with: region order, random ranks, and how DT-FM's own runs were placed."""

import random

from p2p_dtfm.core.errors import UserError
from p2p_dtfm.core.plan import Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.workload import Workload
from p2p_dtfm.sim.published_ranks import PUBLISHED_RANKS
from p2p_dtfm.sim.scenario import Scenario


def grid_plan(
    order: tuple[str, ...], workload: Workload, stages: int, textbook_in_flight: bool = False
) -> Plan:
    """`order` cut into equal pipelines of `stages` peers; the rest are spares.

    Blocks are dealt as evenly as they go, earlier stages first; the embedding joins the first
    stage and the head the last. Raises `UserError` if there are too few peers or blocks.
    """
    replicas = len(order) // stages
    if not replicas or stages > workload.block_count or replicas > workload.microbatch_count:
        raise UserError(
            f"{len(order)} peers, {workload.block_count} blocks and {workload.microbatch_count} "
            f"microbatches do not make pipelines of {stages} stages",
            "choose --stages so that peers, blocks and microbatches suffice",
        )
    cuts = [0, *(_even(workload.block_count, stages, s + 1) + 1 for s in range(stages))]
    cuts[-1] = workload.layer_count
    pipelines, first = [], 0
    for number in range(replicas):
        end = _even(workload.microbatch_count, replicas, number + 1)
        count = end - first
        peers = order[number * stages : (number + 1) * stages]
        depth = [stages - s if textbook_in_flight else count for s in range(stages)]
        placed = tuple(
            Stage(peer, cuts[s], cuts[s + 1], min(depth[s], count)) for s, peer in enumerate(peers)
        )
        pipelines.append(Pipeline(placed, first, count))
        first = end
    plan = Plan(tuple(pipelines), tuple(sorted(order[replicas * stages :])), 0)
    check_plan(plan, workload.layer_count, workload.microbatch_count, set(order))
    return plan


def region_order(scenario: Scenario) -> tuple[str, ...]:
    """Peers as the file lists them: region by region."""
    return tuple(peer.name for peer in scenario.peers)


def random_orders(scenario: Scenario, seed: int) -> list[tuple[str, ...]]:
    """Three random orders. For 64 peers and seed 0: the ranks of the paper's three random runs."""
    names = region_order(scenario)
    if len(names) == 64 and seed == 0:
        return [
            tuple(name for _, name in sorted(zip(ranks, names, strict=True)))
            for ranks in PUBLISHED_RANKS
        ]
    orders = []
    for number in range(3):
        shuffled = list(names)
        random.Random(f"{seed}:{number}").shuffle(shuffled)
        orders.append(tuple(shuffled))
    return orders


def _even(count: int, parts: int, end: int) -> int:
    """Items in the first `end` of `parts` nearly equal parts, the larger ones first."""
    whole, extra = divmod(count, parts)
    return whole * end + min(extra, end)
