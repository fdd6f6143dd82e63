"""Swarms with so many pairs of holders that not every neighbour of a plan can be simulated."""

from p2p_dtfm.core.cost_model.costs import StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner.search import _cut_well
from tests.core.planning import MEBIBYTE, Peer, snapshot, workload

PIPELINES = 205
SMALL = workload(blocks=4, microbatches=2 * PIPELINES, block_parameters=1 << 10)
"""Two stages of this swarm are two segments of 205 holders, which can be simulated once. A layer
handed on in one pipeline makes three segments, which cannot."""
PEERS = [Peer(memory_bytes=40 * MEBIBYTE)] * (2 * PIPELINES)


def test_a_layer_is_not_handed_on_where_that_makes_more_pairs_than_can_be_simulated() -> None:
    """Every peer that planned such a swarm ended with `AssertionError`, and nobody trained."""
    model = StepModel(problem_of(snapshot(PEERS, SMALL)))
    cost = model.cost(tuple((2 * n, 2 * n + 1) for n in range(PIPELINES)))
    assert cost is not None
    assert model.events(cost) < 200_000
    assert _cut_well(model, cost, 1).step_ns <= cost.step_ns
