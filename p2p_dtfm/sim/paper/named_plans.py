"""Plans to compare with: region order, random ranks, and how DT-FM's own runs were placed."""

import json
import random
from pathlib import Path

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.facts.in_words import bytes_text, counted
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Stage, check_plan
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.sim.paper.cost import PAPER_SIZES, PaperSizes, paper_plan
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of
from p2p_dtfm.sim.paper.solver import solve_paper
from p2p_dtfm.sim.scenario.scenario import Scenario

AS_RUN = "-as-run"
"""The end of a scenario's name if its peers stand in the order of their ranks."""


def grid_plan(order: tuple[str, ...], workload: Workload, stages: int) -> Plan:
    """`order` cut into equal pipelines of `stages` peers; the rest are spares.

    Blocks are dealt as evenly as they go, earlier stages first; the embedding joins the first
    stage and the head the last. Any number of microbatches may be in flight.
    Raises `UserError` if there are too few peers or blocks.
    """
    replicas = len(order) // stages
    if not replicas or stages > workload.block_count or replicas > workload.microbatch_count:
        raise UserError(
            f"{counted(len(order), 'peer')}, {counted(workload.block_count, 'block')} and "
            f"{counted(workload.microbatch_count, 'microbatch')} do not make pipelines of "
            f"{counted(stages, 'stage')}",
            "choose --stages so that peers, blocks and microbatches suffice",
        )
    cuts = [0, *(_even(workload.block_count, stages, s + 1) + 1 for s in range(stages))]
    cuts[-1] = workload.layer_count
    pipelines, first = [], 0
    for number in range(replicas):
        end = _even(workload.microbatch_count, replicas, number + 1)
        count = end - first
        peers = order[number * stages : (number + 1) * stages]
        placed = tuple(Stage(peer, cuts[s], cuts[s + 1], count) for s, peer in enumerate(peers))
        pipelines.append(Pipeline(placed, first, count))
        first = end
    plan = Plan(tuple(pipelines), tuple(sorted(order[replicas * stages :])), 0)
    check_plan(plan, workload.layer_count, workload.microbatch_count, set(order))
    return plan


def within_memory(plan: Plan, scenario: Scenario, workload: Workload) -> Plan:
    """The plan with as many microbatches in flight as each peer's memory holds.

    Raises `UserError` for a peer that cannot hold its layers and one microbatch.
    """

    def fitted(stage: Stage, count: int) -> Stage:
        costs = [workload.cost(layer) for layer in stage.layers]
        state = sum(cost.state_bytes for cost in costs)
        saved = sum(cost.saved_bytes for cost in costs)
        memory = scenario.peer(stage.peer_id).memory_bytes
        room = (memory - state) // saved
        if room < 1:
            raise UserError(
                f"{stage.peer_id} has {bytes_text(memory)} of memory; its layers "
                f"{stage.first_layer} to {stage.end_layer - 1} and one microbatch need "
                f"{bytes_text(state + saved)}",
                ("choose more --stages", "recompute activations (--recompute)"),
            )
        return msgspec.structs.replace(stage, in_flight=min(count, room))

    return msgspec.structs.replace(
        plan,
        pipelines=tuple(
            msgspec.structs.replace(
                pipeline,
                stages=tuple(fitted(stage, pipeline.microbatch_count) for stage in pipeline.stages),
            )
            for pipeline in plan.pipelines
        ),
    )


def paper_order(
    scenario: Scenario, stages: int, sizes: PaperSizes = PAPER_SIZES
) -> tuple[str, ...]:
    """Pipelines of the placement that is best by DT-FM's cost, one after the other.

    Raises `UserError` if the stages do not divide the peers.
    """
    problem = paper_problem_of(scenario, stages, len(scenario.peers) // stages, sizes)
    return tuple(name for pipeline in solve_paper(problem).pipelines for name in pipeline)


def dtfm_order(scenario: Scenario, stages: int, sizes: PaperSizes = PAPER_SIZES) -> tuple[str, ...]:
    """The placement of DT-FM's scheduled runs: by hand, in the order of the peers.

    Files named `-as-run` list the peers as the authors' scripts ranked them. For other files it is
    the file order, if that is as good as the best by the paper's cost. Else a solver decides.
    """
    if scenario.name.endswith(AS_RUN):
        return region_order(scenario)
    problem = paper_problem_of(scenario, stages, len(scenario.peers) // stages, sizes)
    groups = tuple(tuple(range(stage, problem.peer_count, stages)) for stage in range(stages))
    best = solve_paper(problem)
    if paper_plan(problem, groups).total_ns <= best.total_ns:
        return region_order(scenario)
    return tuple(name for pipeline in best.pipelines for name in pipeline)


def default_stages(peer_count: int, block_count: int) -> int:
    """The divisor of the peer count that is nearest to its square root, as 8 of 64."""
    divisors = [d for d in range(1, min(peer_count, block_count) + 1) if peer_count % d == 0]
    return min(divisors, key=lambda d: (abs(d * d - peer_count), d))


def region_order(scenario: Scenario) -> tuple[str, ...]:
    """Peers as the file lists them: region by region."""
    return tuple(peer.name for peer in scenario.peers)


def random_orders(scenario: Scenario, seed: int) -> list[tuple[str, ...]]:
    """Three random orders. For 64 peers and seed 0: the ranks of the paper's three random runs."""
    names = region_order(scenario)
    if len(names) == 64 and seed == 0:
        return [
            tuple(name for _, name in sorted(zip(ranks, names, strict=True)))
            for ranks in _published_ranks()
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


def _published_ranks() -> list[list[int]]:
    """The rank given to each GPU in DT-FM's three random runs, in region order."""
    path = Path(__file__).with_name("published_ranks.json")
    ranks: list[list[int]] = json.loads(path.read_bytes())["ranks"]
    return ranks
