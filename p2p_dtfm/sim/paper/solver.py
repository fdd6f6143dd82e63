"""The cheapest placement under the paper's cost: many built starts, annealed in four rounds.

Every start is annealed briefly, the best of them longer, and the best of those longest. All bounds
are counts, in proportion to the number of kinds of peers: interchangeable peers leave less to
search. The result is a function of the problem alone.
"""

import time
from dataclasses import dataclass

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.prng import prng_of_digest
from p2p_dtfm.sim.paper.annealing import MOST_REPLICAS, anneal, ground_of
from p2p_dtfm.sim.paper.built_starts import Packer, Placement
from p2p_dtfm.sim.paper.cost import PaperPlan, PaperProblem, paper_plan
from p2p_dtfm.sim.paper.evaluation import Progress

RANDOM_PACKINGS, LAYERINGS = 33, 60
KINDS_OF_FULL_EFFORT = 20
FULL_EFFORT_REPLICAS, FEWEST_REPLICAS = 8, 4
"""A move takes time in proportion to the replicas, down to a few. So more replicas have fewer
moves. With few replicas a search that begins hotter finds more."""


@dataclass(frozen=True, slots=True)
class _Round:
    """How many of the best placements are annealed, and how."""

    starts: int
    moves: int
    coolness: int
    """The temperature begins at a start's own cost divided by this, and falls to 1/25 of that."""


ROUNDS = (
    _Round(1 << 30, 12_000, 150),
    _Round(10, 150_000, 150),
    _Round(4, 500_000, 200),
    _Round(2, 1_000_000, 300),
)
LEVELS = 100
_COOLING_Q20 = 1_015_361
"""The factor 1/25 over 100 levels."""


def solve_paper(problem: PaperProblem, effort: int = 1) -> PaperPlan:
    """The cheapest placement that is found, always the same for a problem. `effort` multiplies the
    moves of every round. Raises `UserError`."""
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


def solving(problem: PaperProblem) -> list[Progress]:
    """What `solve_paper` has found after the built starts and after each round, in moves."""
    rounds = _Rounds(problem, 1)
    rounds.run()
    return rounds.progress


class _Rounds:
    def __init__(self, problem: PaperProblem, effort: int) -> None:
        self.progress: list[Progress] = []
        self.moves = 0
        self._began = time.process_time()
        self.problem = problem
        self.ground = ground_of(problem)
        self.prng = prng_of_digest(problem.digest())
        self.share = min(KINDS_OF_FULL_EFFORT, max(self.ground.kinds) + 1) * effort

    def run(self) -> Placement:
        starts = Packer(self.problem).starts(self.prng, RANDOM_PACKINGS, LAYERINGS)
        found = [(anneal(self.ground, start, 0, 0, 0, 0, 0)[0], start) for start in starts]
        self._note(len(found), min(found)[0])
        for each in ROUNDS:
            annealed = [min(one, self._anneal(one, each)) for one in found[: each.starts]]
            found = sorted(annealed)
            self._note(self.moves, found[0][0])
        return found[0][1]

    def _note(self, moves: int, total_ns: int) -> None:
        self.progress.append(Progress(moves, time.process_time() - self._began, total_ns))

    def _anneal(self, start: tuple[int, Placement], each: _Round) -> tuple[int, Placement]:
        cost, placement = start
        moves = each.moves * self.share // KINDS_OF_FULL_EFFORT
        moves = moves * FULL_EFFORT_REPLICAS // max(FEWEST_REPLICAS, self.problem.replica_count)
        self.moves += moves
        few = min(FULL_EFFORT_REPLICAS, max(FEWEST_REPLICAS, self.problem.replica_count))
        coolness = each.coolness * few // FULL_EFFORT_REPLICAS
        return anneal(
            self.ground,
            placement,
            self.prng.next_u64(),
            min(cost // coolness, 1 << 38),
            _COOLING_Q20,
            LEVELS,
            max(1, moves // LEVELS),
        )
