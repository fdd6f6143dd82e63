"""The paper's cost: exact, solved to the known optima, equal with and without the kernel."""

import itertools
import math
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.sim.paper.annealing import anneal, ground_of, has_kernel, logarithms
from p2p_dtfm.sim.paper.cost import (
    PaperProblem,
    data_parallel_ns,
    matching,
    paper_plan,
    paper_problem,
    path_ns,
    shortest_path,
)
from p2p_dtfm.sim.paper.scenario_problem import paper_problem_of
from p2p_dtfm.sim.paper.solver import solve_paper
from p2p_dtfm.sim.scenario.scenario import load_scenario

SCENARIOS = Path(__file__).parents[2] / "configs" / "scenarios"
KNOWN = {
    "paper-1-data-center": 3.439799,
    "paper-2-spot": 43.54734,  # the paper's solver reaches this cost; better ones exist
    "paper-3-two-sites": 16.08684,
    "paper-4-regional": 34.802041,
    "paper-5-world-wide": 49.21838,
}


def random_problem(seed: int, stages: int, replicas: int) -> PaperProblem:
    prng = Prng(seed)
    count = stages * replicas
    links = {
        (a, b): (1_000_000 * prng.below(200), 1_000_000 * (1 + prng.below(600)))
        for a in range(count)
        for b in range(count)
    }
    return paper_problem(tuple(f"p{n:02d}" for n in range(count)), stages, lambda a, b: links[a, b])


def processor_s(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


@pytest.mark.parametrize("name", KNOWN)
def test_reaches_the_known_optimum_of_the_papers_cases(name: str) -> None:
    """This takes half a second of one core with the kernel, and tens of seconds without. A busy or
    slow machine takes several times as long for everything. So the limit is in sums of ten million
    numbers: 0.12 s each where the kernel takes 0.5 s."""
    problem = paper_problem_of(load_scenario(SCENARIOS / f"{name}.toml"), 8, 8)
    sums_s = processor_s(lambda: sum(range(10**7)))
    began = time.process_time()
    found = solve_paper(problem)
    elapsed = time.process_time() - began
    sums_s += processor_s(lambda: sum(range(10**7)))
    assert found.total_ns <= KNOWN[name] * 1e9 * (1 + 1e-4)
    if name != "paper-2-spot":
        assert found.total_ns >= KNOWN[name] * 1e9 * (1 - 1e-4)
    if has_kernel():
        assert elapsed < 17 * sums_s / 2


def test_the_spot_case_has_a_better_placement_than_the_one_known() -> None:
    """One GPU of each machine of four in each of four consecutive stages: three fast edges.

    By hand: slow pairs take 0.65 * 8 / (1.25 * 8) * 2 s for gradients and 0.47125 * 8 / 1.25 s
    for activations, fast ones 0.47125 * 8 / 100 s.
    """
    problem = paper_problem_of(load_scenario(SCENARIOS / "paper-2-spot.toml"), 8, 8)
    found = solve_paper(problem)
    slow, fast = 0.47124922275543213 * 8 / 1.25, 0.47124922275543213 * 8 / 100
    by_hand = 7 * 1.04 + 2 * (4 * slow + 3 * fast)
    assert found.total_ns / 1e9 == pytest.approx(by_hand, rel=1e-6)
    machines = [{peer.rsplit("-", 1)[0] for peer in group} for group in found.stages]
    assert sum(len(group) == 8 and "machine1" in group for group in machines) == 4


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.integers(1, 5))
def test_matching_is_the_best_of_all(seed: int, size: int) -> None:
    problem = random_problem(seed, 2, size)
    left, right = tuple(range(size)), tuple(range(size, 2 * size))
    longest, partners = matching(problem, left, right)
    count, table = 2 * size, problem.pipeline_ns

    def worst(order: tuple[int, ...]) -> int:
        return max(table[a * count + b] for a, b in zip(left, order, strict=True))

    assert longest == worst(partners) == min(map(worst, itertools.permutations(right)))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1 << 32))
def test_the_path_is_the_shortest_of_all(seed: int) -> None:
    problem = random_problem(seed, 5, 2)
    groups = tuple((2 * at, 2 * at + 1) for at in range(5))
    best = min(path_ns(problem, order) for order in itertools.permutations(groups))
    assert path_ns(problem, shortest_path(problem, groups)) == best


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([(2, 1), (2, 3), (3, 2), (5, 4), (4, 8)]),
    st.integers(0, 1 << 34),
)
def test_kernel_and_its_twin_agree(seed: int, shape: tuple[int, int], temperature: int) -> None:
    if not has_kernel():
        pytest.skip("no compiled kernel on this machine")
    problem = random_problem(seed, *shape)
    start = list(range(problem.peer_count))
    Prng(seed).shuffle(start)
    arguments = (ground_of(problem), tuple(start), seed, temperature, 900_000, 20, 25)
    assert anneal(*arguments) == anneal(*arguments, compiled=False)


def test_annealing_reports_the_true_cost_of_what_it_returns() -> None:
    problem = random_problem(5, 4, 4)
    cost, found = anneal(ground_of(problem), tuple(range(16)), 1, 1 << 33, 1_000_000, 100, 50)
    groups = tuple(found[at : at + 4] for at in range(0, 16, 4))
    assert cost == data_parallel_ns(problem, groups) + 2 * path_ns(problem, groups)


def test_small_instances_are_solved_exactly() -> None:
    """All placements of six peers in three stages of two are tried."""
    for seed in range(5):
        problem = random_problem(seed, 3, 2)
        costs = []
        for order in itertools.permutations(range(6)):
            groups = (order[:2], order[2:4], order[4:])
            costs.append(data_parallel_ns(problem, groups) + 2 * path_ns(problem, groups))
        assert solve_paper(problem).total_ns == min(costs)


def test_logarithms() -> None:
    for index, value in enumerate(logarithms()):
        assert abs(value + math.log((2 * index + 1) / 8192) * (1 << 20)) < 2


def test_interchangeable_peers_are_of_one_kind() -> None:
    problem = paper_problem_of(load_scenario(SCENARIOS / "paper-2-spot.toml"), 8, 8)
    kinds = ground_of(problem).kinds
    assert max(kinds) + 1 == 9
    assert kinds[32:] == array("q", [8] * 32)


def test_plan_of_the_paper_is_whole() -> None:
    problem = random_problem(1, 4, 3)
    plan = paper_plan(problem, tuple((3 * s, 3 * s + 1, 3 * s + 2) for s in range(4)))
    assert sorted(peer for group in plan.stages for peer in group) == list(problem.peer_ids)
    assert [set(group) for group in zip(*plan.pipelines, strict=True)] == [
        set(group) for group in plan.stages
    ]


def test_one_stage_and_one_replica() -> None:
    assert solve_paper(random_problem(1, 1, 6)).pipeline_ns == 0
    assert solve_paper(random_problem(1, 6, 1)).data_parallel_ns == 0


def test_a_grid_that_does_not_fit_is_refused() -> None:
    scenario = load_scenario(SCENARIOS / "paper-2-spot.toml")
    with pytest.raises(UserError, match="7 stages of 8 replicas do not make the 64"):
        paper_problem_of(scenario, 7, 8)
