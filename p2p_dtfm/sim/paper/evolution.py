"""The paper's search, written from its section 3.4: a hybrid genetic algorithm over partitions.

A population consists of balanced partitions. Two parents make a child: their groups are matched by
what they have in common, and each peer goes where one of the two has it. Groups that are too full
then give to those that are too empty. A local search improves the child. It takes the place of the
worst partition, if it is better than that.

The local search is the paper's in its circular form. A group gives away an end of its fastest pair,
since that pair will then serve between the two groups. The peer goes to the group that it is the
farthest from. That group gives one of its own on, and the last one gives to the first. For
comparison, as in the paper's figure 4, the search may instead be Kernighan and Lin's exchange of
two groups, as networkx has it.
"""

import random
from collections.abc import Callable
from typing import Literal

import networkx

from p2p_dtfm.sim.paper.cost import PaperProblem, Stages
from p2p_dtfm.sim.paper.evaluation import Evaluator, Progress

POPULATION = 24
KERNIGHAN_LIN_PASSES = 4
"""Passes over one pair of groups. networkx's own default is 10."""

LocalSearch = Literal["circular", "kernighan-lin"]
Groups = list[list[int]]


def evolve(
    problem: PaperProblem, local_search: LocalSearch, seed: int, evaluations: int
) -> list[Progress]:
    """The results and when they were found, until so many partitions were evaluated."""
    return _Evolution(problem, local_search, seed, evaluations).run()


def draw(problem: PaperProblem, seed: int, evaluations: int) -> list[Progress]:
    """The best of so many partitions drawn at random."""
    chance, judge = random.Random(f"draw {seed}"), Evaluator(problem)
    while judge.evaluations < evaluations:
        judge.total_ns(_stages(_random_groups(problem, chance)))
    return judge.ended()


class _Evolution:
    def __init__(
        self, problem: PaperProblem, local_search: LocalSearch, seed: int, evaluations: int
    ) -> None:
        self.problem = problem
        self.evaluations = evaluations
        self.chance = random.Random(f"{local_search} {seed}")
        self.judge = Evaluator(problem)
        count = problem.peer_count
        table = problem.pipeline_ns
        self.pair = [list(table[a * count : (a + 1) * count]) for a in range(count)]
        improvements: dict[LocalSearch, Callable[[Groups, int], Groups | None]] = {
            "circular": self._circular,
            "kernighan-lin": self._kernighan_lin,
        }
        self.improvement = improvements[local_search]

    def run(self) -> list[Progress]:
        population: list[tuple[int, Groups]] = []
        while len(population) < POPULATION and self._left():
            population.append(self._local_search(_random_groups(self.problem, self.chance)))
        while self._left():
            one, other = self.chance.sample(population, 2)
            child = self._local_search(self._child(one[1], other[1]))
            worst = max(range(len(population)), key=lambda at: population[at][0])
            if child[0] < population[worst][0] and child not in population:
                population[worst] = child
        return self.judge.ended()

    def _left(self) -> bool:
        return self.judge.evaluations < self.evaluations

    def _cost(self, groups: Groups) -> int:
        return self.judge.total_ns(_stages(groups))

    def _child(self, one: Groups, other: Groups) -> Groups:
        """A child of two parents. Kang and Moon 2000 match the groups first, lest equal ones cancel
        out."""
        size = len(one[0])
        free = list(range(len(other)))
        home = {}
        for group in one:
            inside = set(group)
            like = max(free, key=lambda at: len(inside.intersection(other[at])))
            free.remove(like)
            for peer in other[like]:
                home[peer] = group
        place = {id(group): number for number, group in enumerate(one)}
        child: Groups = [[] for _ in one]
        for number, group in enumerate(one):
            for peer in group:
                stays = self.chance.random() < 0.5
                child[number if stays else place[id(home[peer])]].append(peer)
        moving = []
        for group in child:
            self.chance.shuffle(group)
            while len(group) > size:
                moving.append(group.pop())
        for group in child:
            while len(group) < size:
                group.append(moving.pop(self.chance.randrange(len(moving))))
        return child

    def _local_search(self, groups: Groups) -> tuple[int, Groups]:
        """Search from each group in turn, for as long as one of them improves the partition."""
        cost = self._cost(groups)
        better = True
        while better and self._left():
            better = False
            starts = list(range(len(groups)))
            self.chance.shuffle(starts)
            for start in starts:
                tried = self.improvement(groups, start)
                if tried is None or not self._left():
                    continue
                found = self._cost(tried)
                if found < cost:
                    cost, groups, better = found, tried, True
        return cost, groups

    def _circular(self, groups: Groups, start: int) -> Groups | None:
        """The cycle of moves that begins at a group, or None where no move promises anything."""
        visited = [start]
        moved: list[int] = []
        while len(visited) < len(groups):
            here = groups[visited[-1]]
            others = [at for at in range(len(groups)) if at not in visited]
            offers = [
                (self._gain(peer, partner, groups[at]), peer, at)
                for peer, partner in self._ends(here)
                for at in others
            ]
            gain, peer, at = max(offers, default=(0.0, -1, -1))
            if gain <= 0:
                break
            visited.append(at)
            moved.append(peer)
        if not moved:
            return None
        moved.append(self.chance.choice(self._ends(groups[visited[-1]]))[0])
        changed = [list(group) for group in groups]
        for number, peer in enumerate(moved):
            target = visited[(number + 1) % len(visited)]
            changed[visited[number]].remove(peer)
            changed[target].append(peer)
        return changed

    def _ends(self, group: list[int]) -> list[tuple[int, int]]:
        """The two peers of the group's fastest pair, each with the other. Of equal pairs, any."""
        if len(group) < 2:
            return [(group[0], group[0])]
        pairs = [(self.pair[a][b], a, b) for i, a in enumerate(group) for b in group[:i]]
        fastest = min(pairs)[0]
        _, a, b = self.chance.choice([pair for pair in pairs if pair[0] == fastest])
        return [(a, b), (b, a)]

    def _gain(self, peer: int, partner: int, target: list[int]) -> float:
        """Half of the paper's gain: the peer's mean cost towards the group, less its pair's."""
        row = self.pair[peer]
        return sum([row[there] for there in target]) / len(target) - row[partner]

    def _kernighan_lin(self, groups: Groups, start: int) -> Groups | None:
        """The group and another one, cut anew so that their mutual cost is least."""
        if len(groups) < 2:
            return None
        other = self.chance.choice([at for at in range(len(groups)) if at != start])
        both = [*groups[start], *groups[other]]
        graph = networkx.Graph()
        graph.add_weighted_edges_from(
            (a, b, self.pair[a][b]) for i, a in enumerate(both) for b in both[:i]
        )
        halves = networkx.algorithms.community.kernighan_lin_bisection(
            graph,
            partition=(set(groups[start]), set(groups[other])),
            max_iter=KERNIGHAN_LIN_PASSES,
            seed=self.chance,
        )
        changed = [list(group) for group in groups]
        changed[start], changed[other] = (sorted(half) for half in halves)
        return changed


def _random_groups(problem: PaperProblem, chance: random.Random) -> Groups:
    peers = list(range(problem.peer_count))
    chance.shuffle(peers)
    size = problem.replica_count
    return [peers[at * size : (at + 1) * size] for at in range(problem.stage_count)]


def _stages(groups: Groups) -> Stages:
    return tuple(tuple(group) for group in groups)
