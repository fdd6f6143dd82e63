"""Simulated annealing on the paper's cost, in 64-bit integers: the compiled kernel or its twin.

Moves: exchange two peers of unlike stages, or reverse a run of stages. A move that makes the total
longer by d at temperature T is taken with probability exp(-d / T) (Kirkpatrick et al. 1983),
decided as d <= -T ln(u) with a table of logarithms. `_kernel.c` is this algorithm in C, hundreds
of times as fast; both give equal results for equal arguments.
"""

from array import array
from dataclasses import dataclass
from functools import lru_cache

from p2p_dtfm.core.protocol.prng import Prng
from p2p_dtfm.sim.paper.cost import PaperProblem

try:
    from p2p_dtfm.sim.paper import _kernel
except ImportError:  # no C compiler when this was installed
    _kernel = None  # type: ignore[assignment]

MOST_REPLICAS = 64
"""As many as the kernel's bit masks hold."""
_ENTRIES = 4096
_LN2_Q32 = 2_977_044_472
Q20 = 1 << 20


def has_kernel() -> bool:
    """Whether the compiled kernel was built."""
    return _kernel is not None


@lru_cache(maxsize=1)
def logarithms() -> "array[int]":
    """-ln((2 i + 1) / 8192) in units of 2^-20, for i in 0 .. 4095."""
    table = array("q")
    for index in range(_ENTRIES):
        below_one_q32 = (13 << 32) - _log2_q32(2 * index + 1)
        table.append((below_one_q32 * _LN2_Q32) >> 44)
    return table


def _log2_q32(value: int) -> int:
    """Binary logarithm of a positive integer in units of 2^-32, bit by bit by squaring."""
    whole = value.bit_length() - 1
    mantissa = value << (40 - whole)
    result = whole
    for _ in range(32):
        mantissa = mantissa * mantissa >> 40
        bit = mantissa >> 41
        mantissa >>= bit
        result = result << 1 | bit
    return result


@dataclass(frozen=True)
class Ground:
    """A problem with what every annealing of it needs."""

    problem: PaperProblem
    kinds: "array[int]"
    """A number for each peer; peers with equal numbers have equal links to everybody else."""
    pair_ranks: "array[int]"
    """Each pair's pipeline time as its place in `lengths_ns`, 32 bits wide."""
    lengths_ns: "array[int]"
    """Distinct pipeline times, ascending."""


def ground_of(problem: PaperProblem) -> Ground:
    """Ranks times and finds interchangeable peers; takes about peers^2 comparisons."""
    lengths = sorted(set(problem.pipeline_ns))
    ranks = {length: rank for rank, length in enumerate(lengths)}
    pairs = array("i", map(ranks.__getitem__, problem.pipeline_ns))
    return Ground(problem, _kinds(problem), pairs, array("q", lengths))


def anneal(
    ground: Ground,
    start: tuple[int, ...],
    seed: int,
    temperature_ns: int,
    factor_q20: int,
    levels: int,
    moves: int,
    compiled: bool = True,
) -> tuple[int, tuple[int, ...]]:
    """(total in ns, placement) of the best placement met.

    A placement lists the peers of the first stage, then of the second, and so on. Exchanges of
    peers of one kind are skipped. After each of `levels` times `moves` moves the temperature is
    multiplied by `factor_q20` / 2^20.
    """
    problem = ground.problem
    assert problem.stage_count > 1 and problem.replica_count <= MOST_REPLICAS
    if compiled and _kernel is not None:
        best, members = _kernel.paper_anneal(
            problem.data_parallel_ns,
            ground.pair_ranks,
            ground.lengths_ns,
            ground.kinds,
            array("q", start),
            logarithms(),
            problem.stage_count,
            problem.replica_count,
            seed,
            temperature_ns,
            factor_q20,
            levels,
            moves,
        )
        placement = array("q")
        placement.frombytes(members)
        return best, tuple(placement)
    walk = _KernelWalk(ground, start, seed)
    return walk.anneal(temperature_ns, factor_q20, levels, moves)


def _kinds(problem: PaperProblem) -> "array[int]":
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
    """Whether two peers' rows are equal but for the entries that concern the two themselves."""
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


class _KernelWalk:
    """The kernel's state and moves, in Python; see `_kernel.c` for what each part does."""

    def __init__(self, ground: Ground, start: tuple[int, ...], seed: int) -> None:
        problem = ground.problem
        self.stages, self.replicas = problem.stage_count, problem.replica_count
        count = problem.peer_count
        self.pair_dp = [
            list(problem.data_parallel_ns[a * count : (a + 1) * count]) for a in range(count)
        ]
        self.pair_pp = [
            list(problem.pipeline_ns[a * count : (a + 1) * count]) for a in range(count)
        ]
        self.kinds = list(ground.kinds)
        size = self.replicas
        self.groups = [list(start[at * size : (at + 1) * size]) for at in range(self.stages)]
        self.random = Prng(seed)
        self.rows = [self._rows(group) for group in self.groups]
        self.largest = [max(rows) for rows in self.rows]
        self.edges = [self._edge(at, at + 1, None) for at in range(self.stages - 1)]

    def _rows(self, group: list[int]) -> list[int]:
        return [sum(self.pair_dp[a][b] for b in group) for a in group]

    def total(self) -> int:
        return max(self.largest) + 2 * sum(self.edges)

    def anneal(
        self, temperature: int, factor: int, levels: int, moves: int
    ) -> tuple[int, tuple[int, ...]]:
        logs = logarithms()
        now = best = self.total()
        best_groups = [list(group) for group in self.groups]
        for _ in range(levels):
            for _ in range(moves):
                drawn = self.random.next_u64()
                limit = now + (temperature * logs[drawn & 4095] >> 20)
                if drawn >> 12 & 15:
                    now = self._try_swap(now, limit)
                else:
                    now = self._try_reverse(now, limit)
                if now < best:
                    best = now
                    best_groups = [list(group) for group in self.groups]
            temperature = temperature * factor >> 20
        return best, tuple(peer for group in best_groups for peer in group)

    def _try_swap(self, now: int, limit: int) -> int:
        a = self.random.below(self.stages)
        b = self.random.below(self.stages - 1)
        i, j = self.random.below(self.replicas), self.random.below(self.replicas)
        b += b >= a
        x, y = self.groups[a][i], self.groups[b][j]
        if self.kinds[x] == self.kinds[y]:
            return now
        rows_a, rows_b = self._replaced(a, i, y), self._replaced(b, j, x)
        largest_a, largest_b = max(rows_a), max(rows_b)
        others = (self.largest[at] for at in range(self.stages) if at not in (a, b))
        largest = max(largest_a, largest_b, max(others, default=0))
        touched = [
            at for at in dict.fromkeys((a - 1, a, b - 1, b)) if at >= 0 and at + 1 < self.stages
        ]
        path = sum(self.edges) - sum(self.edges[at] for at in touched)
        if largest + 2 * path > limit:
            return now
        self.groups[a][i], self.groups[b][j] = y, x
        renewed: list[int] = []
        for at in touched:
            edge = self._edge(at, at + 1, (limit - largest) // 2 - path)
            path += edge
            if largest + 2 * path > limit:
                self.groups[a][i], self.groups[b][j] = x, y
                return now
            renewed.append(edge)
        self.rows[a], self.rows[b] = rows_a, rows_b
        self.largest[a], self.largest[b] = largest_a, largest_b
        for at, edge in zip(touched, renewed, strict=True):
            self.edges[at] = edge
        return largest + 2 * path

    def _replaced(self, stage: int, slot: int, newcomer: int) -> list[int]:
        group = self.groups[stage]
        gone, come = self.pair_dp[group[slot]], self.pair_dp[newcomer]
        rows = [
            row - gone[peer] + come[peer] for row, peer in zip(self.rows[stage], group, strict=True)
        ]
        rows[slot] = sum(come[peer] for peer in group) - come[group[slot]]
        return rows

    def _try_reverse(self, now: int, limit: int) -> int:
        first, last = self.random.below(self.stages), self.random.below(self.stages)
        if first > last:
            first, last = last, first
        if first == last:
            return now
        change, before, after = 0, None, None
        if first > 0:
            before = self._edge(first - 1, last, None)
            change += before - self.edges[first - 1]
        if last + 1 < self.stages:
            after = self._edge(first, last + 1, None)
            change += after - self.edges[last]
        if now + 2 * change > limit:
            return now
        self.groups[first : last + 1] = self.groups[first : last + 1][::-1]
        self.rows[first : last + 1] = self.rows[first : last + 1][::-1]
        self.largest[first : last + 1] = self.largest[first : last + 1][::-1]
        self.edges[first:last] = self.edges[first:last][::-1]
        if before is not None:
            self.edges[first - 1] = before
        if after is not None:
            self.edges[last] = after
        return now + 2 * change

    def _edge(self, a: int, b: int, most: int | None) -> int:
        """The bottleneck between two stages; beyond `most` any number above it."""
        right = self.groups[b]
        owner = [-1] * self.replicas
        limit = 0
        for row, start in enumerate(self.groups[a]):
            weights = self.pair_pp[start]
            slack = [(weights[peer], column, row) for column, peer in enumerate(right)]
            parent: dict[int, int] = {}
            while True:
                weight, column, came_from = min(slack)
                if weight > limit:
                    limit = weight
                    if most is not None and limit > most:
                        return limit
                parent[column] = came_from
                at = owner[column]
                if at < 0:
                    break
                weights = self.pair_pp[self.groups[a][at]]
                slack = [
                    (weights[right[c]], c, at) if weights[right[c]] < known else (known, c, r)
                    for known, c, r in slack
                    if c != column
                ]
            while column >= 0:
                taken_by = parent[column]
                freed = owner.index(taken_by) if taken_by != row else -1
                owner[column] = taken_by
                column = freed
        return limit
