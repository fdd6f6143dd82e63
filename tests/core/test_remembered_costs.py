"""A search that remembers costs finds what a search finds that does not, and counts the same
work."""

import random
from itertools import permutations

import pytest

from p2p_dtfm.core.cost_model.costs import Placement, PlacementCost, StepModel
from p2p_dtfm.core.cost_model.placement_problem import problem_of
from p2p_dtfm.core.planner import remembered_costs
from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.planner.remembered_costs import RememberedCosts
from p2p_dtfm.core.protocol.records import Link
from p2p_dtfm.core.protocol.snapshot import Snapshot
from tests.core.planning import Peer, snapshot, workload


def drawn(number: int) -> Snapshot:
    draws = random.Random(number)
    peers = [
        Peer(draws.randrange(1_000_000, 9_000_000), memory_bytes=draws.choice([1 << 28, 1 << 40]))
        for _ in range(3 + number)
    ]
    links = {
        (one, other): Link(draws.randrange(10**6, 4 * 10**7), draws.randrange(1 << 20, 1 << 27))
        for one in range(len(peers))
        for other in range(len(peers))
        if one != other
    }
    return snapshot(peers, workload(blocks=4, microbatches=4), links)


def alike() -> Snapshot:
    """Alike peers: the order of pipelines decides which one gets the microbatch left over."""
    return snapshot([Peer()] * 4 + [Peer(uplink_bytes_per_s=1 << 20)], workload(4, 5))


def test_plans_are_the_same_with_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    snapshots = [*(drawn(number) for number in range(4)), alike()]
    found = [compute_plan(made) for made in snapshots]
    monkeypatch.setattr(remembered_costs, "MOST_PEERS", 0)
    assert [compute_plan(made) for made in snapshots] == found


@pytest.mark.parametrize("made", [drawn(3), alike()], ids=["unlike peers", "alike"])
def test_whatever_comes_again_costs_the_same_and_as_much_work(made: Snapshot) -> None:
    kept, plain = StepModel(problem_of(made)), StepModel(problem_of(made))
    costs = RememberedCosts(kept)
    everyone = tuple((peer,) for peer in range(5))
    both: tuple[Placement, ...] = (((0, 1), (2,), (3, 4)), ((0,), (1, 2, 3)), everyone)
    long_ns, short_ns = 1 << 60, 1_000_000
    for placement in both:
        for order in [*permutations(placement), *permutations(placement)]:
            for bound_ns in (short_ns, long_ns, short_ns):
                assert seen(costs.cost(order, bound_ns)) == seen(plain.cost(order, bound_ns))
                assert kept.work == plain.work, (order, bound_ns)


def seen(cost: PlacementCost | None) -> object:
    return cost and (cost, cost.pipelines_ns)
