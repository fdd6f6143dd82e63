"""The cheapest placement under the paper's cost: many packed starts, annealed in three rounds.

Every start is annealed briefly, the best of them longer, the best of those longest. All bounds are
counts, in proportion to how many kinds of peers there are: where peers are interchangeable there
is less to search. The result is a function of the problem alone.
"""

from array import array

from p2p_dtfm.core.errors import UserError
from p2p_dtfm.core.paper_anneal import MOST_REPLICAS, anneal
from p2p_dtfm.core.paper_cost import PaperPlan, PaperProblem, paper_plan
from p2p_dtfm.core.paper_starts import Packer, Placement
from p2p_dtfm.core.prng import prng_of_digest

RANDOM_PACKINGS = 140
KINDS_OF_FULL_EFFORT = 20
LEVELS = 200
FIRST_ROUND_MOVES = 15_000
SECOND_ROUND_MOVES, SECOND_ROUND_STARTS = 120_000, 12
THIRD_ROUND_MOVES = 400_000

_COOLING_Q20 = 1_031_899
"""Over 200 levels a factor of 1/25."""


def solve_paper(problem: PaperProblem, effort: int = 1) -> PaperPlan:
    """Deterministic. `effort` multiplies the moves of every round. Raises `UserError`."""
    if problem.replica_count > MOST_REPLICAS:
        raise UserError(
            f"{problem.replica_count} replicas are more than {MOST_REPLICAS}, as many as the "
            "paper's cost is solved for",
            "choose more --stages and fewer --replicas, or plan with --cost step",
        )
    if problem.stage_count == 1:
        return paper_plan(problem, (tuple(range(problem.peer_count)),))
    best = _Rounds(problem, effort).run()
    size = problem.replica_count
    groups = tuple(best[at * size : (at + 1) * size] for at in range(problem.stage_count))
    return paper_plan(problem, groups)


class _Rounds:
    def __init__(self, problem: PaperProblem, effort: int) -> None:
        self.problem = problem
        self.kinds = kinds_of(problem)
        self.prng = prng_of_digest(problem.digest())
        self.share = min(KINDS_OF_FULL_EFFORT, max(self.kinds) + 1) * effort

    def run(self) -> Placement:
        starts = Packer(self.problem).starts(self.prng, RANDOM_PACKINGS)
        first = sorted(self._anneal(start, FIRST_ROUND_MOVES, 300) for start in starts)
        second = sorted(
            min(found, self._anneal(found[1], SECOND_ROUND_MOVES, 300))
            for found in first[:SECOND_ROUND_STARTS]
        )
        found = second[0]
        return min(found, self._anneal(found[1], THIRD_ROUND_MOVES, 500))[1]

    def _anneal(self, start: Placement, moves: int, coolness: int) -> tuple[int, Placement]:
        """From a temperature of 1/`coolness` of the start's own worth down to 1/25 of that."""
        moves = moves * self.share // KINDS_OF_FULL_EFFORT
        cost, _ = anneal(self.problem, self.kinds, start, 0, 0, 0, 0, 0)
        return anneal(
            self.problem,
            self.kinds,
            start,
            self.prng.next_u64(),
            min(cost // coolness, 1 << 38),
            _COOLING_Q20,
            LEVELS,
            max(1, moves // LEVELS),
        )


def kinds_of(problem: PaperProblem) -> "array[int]":
    """A number for each peer; peers with equal numbers have equal links to everybody else."""
    count = problem.peer_count
    tables = (problem.data_parallel_ns, problem.pipeline_ns)
    rows = [[list(t[a * count : (a + 1) * count]) for t in tables] for a in range(count)]
    firsts: list[int] = []
    kinds = array("q")
    for peer in range(count):
        for kind, first in enumerate(firsts):
            if all(_alike(rows[peer][t], rows[first][t], peer, first) for t in (0, 1)):
                kinds.append(kind)
                break
        else:
            kinds.append(len(firsts))
            firsts.append(peer)
    return kinds


def _alike(row: list[int], other: list[int], peer: int, first: int) -> bool:
    """Equal but for the two entries that concern the two themselves."""
    own, mine = row[peer], row[first]
    return (
        mine == other[peer]
        and own == other[first]
        and all(
            a == b
            for at, (a, b) in enumerate(zip(row, other, strict=True))
            if at not in (peer, first)
        )
    )
