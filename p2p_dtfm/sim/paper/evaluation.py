"""The paper's cost of one partition after another, counted: for comparing ways to search.

The cost of a group or an edge depends on the kinds of its peers alone, so it is kept by kinds.
"""

import time
from dataclasses import dataclass

from p2p_dtfm.sim.paper.annealing import ground_of
from p2p_dtfm.sim.paper.cost import PaperProblem, Stages, data_parallel_ns, matching

Kinds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """How good the best result of a search was when it was found."""

    evaluations: int
    seconds: float
    total_ns: int


class Evaluator:
    """Costs of partitions, and a note of each that was better than all before it."""

    def __init__(self, problem: PaperProblem) -> None:
        self.problem = problem
        self.kinds = list(ground_of(problem).kinds)
        self.evaluations = 0
        self.progress: list[Progress] = []
        self._group: dict[Kinds, int] = {}
        self._edge: dict[tuple[Kinds, Kinds], int] = {}
        self._total: dict[tuple[Kinds, ...], int] = {}
        self._began = time.process_time()

    @property
    def seconds(self) -> float:
        """Processor seconds of this process since the beginning."""
        return time.process_time() - self._began

    def ended(self) -> list[Progress]:
        """All notes, and the state of the search at its end."""
        best_ns = self.progress[-1].total_ns
        return [*self.progress, Progress(self.evaluations, self.seconds, best_ns)]

    def total_ns(self, stages: Stages) -> int:
        """The cost of groups in any order: the path through them is the shortest."""
        named = sorted((self._kinds_of(group), group) for group in stages)
        key = tuple(kinds for kinds, _ in named)
        known = self._total.get(key)
        if known is None:
            groups = [group for _, group in named]
            slowest = max(self._group_ns(kinds, group) for kinds, group in named)
            edges = [[0] * len(groups) for _ in groups]
            for a in range(len(groups)):
                for b in range(a):
                    edges[a][b] = edges[b][a] = self._edge_ns(
                        (key[a], key[b]), groups[a], groups[b]
                    )
            known = self._total[key] = slowest + 2 * shortest_path_ns(edges)
        self.evaluations += 1
        if not self.progress or known < self.progress[-1].total_ns:
            self.progress.append(Progress(self.evaluations, self.seconds, known))
        return known

    def _kinds_of(self, group: tuple[int, ...]) -> Kinds:
        return tuple(sorted([self.kinds[peer] for peer in group]))

    def _group_ns(self, kinds: Kinds, group: tuple[int, ...]) -> int:
        if kinds not in self._group:
            self._group[kinds] = data_parallel_ns(self.problem, (group,))
        return self._group[kinds]

    def _edge_ns(
        self, key: tuple[Kinds, Kinds], left: tuple[int, ...], right: tuple[int, ...]
    ) -> int:
        if key not in self._edge:
            self._edge[key] = matching(self.problem, left, right)[0]
        return self._edge[key]


def shortest_path_ns(edges: list[list[int]]) -> int:
    """Length of the shortest open path through all nodes (Held and Karp 1962)."""
    count = len(edges)
    full = (1 << count) - 1
    far = 1 << 62
    best = [[far] * count for _ in range(full + 1)]
    for at in range(count):
        best[1 << at][at] = 0
    for visited in range(1, full):
        row = best[visited]
        for after in range(count):
            if visited >> after & 1:
                continue
            step = edges[after]
            offer = min(
                [length + edge for length, edge in zip(row, step, strict=True) if length < far],
            )
            target = best[visited | 1 << after]
            if offer < target[after]:
                target[after] = offer
    return min(best[full])
