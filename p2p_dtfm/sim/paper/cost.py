"""DT-FM's own cost of a placement, in nanoseconds: for reproducing the paper and comparing.

Yuan et al. 2022, "Decentralized Training of Foundation Models in Heterogeneous Environments",
section 3.2, with latency a and bandwidth b averaged over both directions:

    data parallel = max over stage groups C and d in C of sum over d' in C of 2 (a + c_dp/(|C| b))
    edge(C, C')   = over perfect matchings of C and C', the least possible largest a + c_pp / b
    pipeline      = 2 * the shortest open path through all groups
    total         = data parallel + pipeline

Every pair's time is rounded to a whole nanosecond once; all else is exact in integers.
"""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from p2p_dtfm.core.protocol.canonical import digest, digest_bytes


@dataclass(frozen=True, slots=True)
class PaperSizes:
    """The bytes that the cost counts, before they are divided by stages and replicas."""

    name: str
    """The name of the preset or the run."""
    gradient_bytes: int
    """Bytes of all blocks' gradients. A stage reduces its even share, c_dp. Embedding and head are
    left out, as in the paper."""
    activation_bytes: int
    """Bytes of a whole batch at one boundary. A pipeline passes on its even share, c_pp."""

    def gradient_bytes_per_stage(self, stages: int) -> int:
        return -(-self.gradient_bytes // stages)

    def activation_bytes_per_link(self, replicas: int) -> int:
        return -(-self.activation_bytes // replicas)


PAPER_SIZES = PaperSizes("paper", gradient_bytes=5_200_000_000, activation_bytes=3_769_993_784)
"""The constants of the paper's own scheduler, whatever was then trained. They are those of GPT-3 XL
of 24 layers: 1.3e9 parameters in fp32, and a batch of 1e6 tokens in fp16. In 8 stages of 8 replicas
c_dp is 0.65 GB and c_pp 0.47124922275543213 GB."""

Stages = tuple[tuple[int, ...], ...]
"""Groups in pipeline order. The solver decides the order within a group."""

EXACT_PATH_STAGES = 11
"""The most stages whose path is found exactly (Held and Karp 1962)."""


@dataclass(frozen=True)
class PaperProblem:
    """`data_parallel_ns` and `pipeline_ns` are symmetric, row after row, peers in file order."""

    peer_ids: tuple[str, ...]
    stage_count: int
    replica_count: int
    data_parallel_ns: "array[int]"
    """2 (a + c_dp / (replicas * b)) of each pair."""
    pipeline_ns: "array[int]"
    """a + c_pp / b of each pair."""

    @property
    def peer_count(self) -> int:
        return len(self.peer_ids)

    def digest(self) -> str:
        """The digest that names the instance: peers, shape and every pair's times."""
        pairs = b"".join(
            value.to_bytes(8, "little")
            for table in (self.data_parallel_ns, self.pipeline_ns)
            for value in table
        )
        shape = (self.peer_ids, self.stage_count, self.replica_count, digest_bytes(pairs))
        return digest(shape)


class PaperPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the paper's scheduler decides: groups in pipeline order, and which peer hands to
    which."""

    stages: tuple[tuple[str, ...], ...]
    pipelines: tuple[tuple[str, ...], ...]
    """Peers that the perfect matchings chain together, first stage to last."""
    data_parallel_ns: int
    pipeline_ns: int
    """Twice the path."""

    @property
    def total_ns(self) -> int:
        return self.data_parallel_ns + self.pipeline_ns

    def digest(self) -> str:
        return digest(self)


def paper_problem(
    peer_ids: tuple[str, ...],
    stage_count: int,
    link: Callable[[int, int], tuple[int, int]],
    sizes: PaperSizes = PAPER_SIZES,
) -> PaperProblem:
    """`link(a, b)` gives (latency ns, bytes per second) from a to b; peers divide by stages."""
    count = len(peer_ids)
    assert count % stage_count == 0, (count, stage_count)
    replicas = count // stage_count
    gradient_bytes = sizes.gradient_bytes_per_stage(stage_count)
    activation_bytes = sizes.activation_bytes_per_link(replicas)
    data_parallel = array("q", [0]) * (count * count)
    pipeline = array("q", [0]) * (count * count)
    for a in range(count):
        for b in range(a + 1, count):
            (there_ns, there_rate), (back_ns, back_rate) = link(a, b), link(b, a)
            latency2, rate2 = there_ns + back_ns, there_rate + back_rate
            dp = _rounded(
                latency2 * replicas * rate2 + 4 * gradient_bytes * 10**9, replicas * rate2
            )
            pp = _rounded(latency2 * rate2 + 4 * activation_bytes * 10**9, 2 * rate2)
            for index in (a * count + b, b * count + a):
                data_parallel[index], pipeline[index] = dp, pp
    return PaperProblem(peer_ids, stage_count, replicas, data_parallel, pipeline)


def _rounded(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)


def data_parallel_ns(problem: PaperProblem, stages: Stages) -> int:
    """The time of the slowest member of the slowest group."""
    count, table = problem.peer_count, problem.data_parallel_ns
    return max(sum(table[a * count + b] for b in group) for group in stages for a in group)


def matching(
    problem: PaperProblem, left: tuple[int, ...], right: tuple[int, ...]
) -> tuple[int, tuple[int, ...]]:
    """(largest pair, partner of each of `left`) of the matching whose largest pair is smallest.

    Rows are matched one after another by alternating trees that grow along the least pair, which
    makes each raise of the largest pair unavoidable (Gabow and Tarjan 1988 name the problem).
    """
    count, table = problem.peer_count, problem.pipeline_ns
    size = len(left)
    weights = [[table[a * count + b] for b in right] for a in left]
    owner: list[int | None] = [None] * size
    limit = 0
    for row in range(size):
        slack = [(weight, row) for weight in weights[row]]
        parent: dict[int, int] = {}
        while True:
            free = [column for column in range(size) if column not in parent]
            best = min(free, key=lambda column: (slack[column][0], column))
            limit = max(limit, slack[best][0])
            parent[best] = slack[best][1]
            at = owner[best]
            if at is None:
                break
            slack = [
                (weights[at][column], at) if weights[at][column] < slack[column][0] else known
                for column, known in enumerate(slack)
            ]
        column: int | None = best
        while column is not None:
            taken_by = parent[column]
            freed = next((c for c in range(size) if owner[c] == taken_by), None)
            owner[column] = taken_by
            column = freed
    partner = {row: column for column, row in enumerate(owner)}
    return limit, tuple(right[partner[row]] for row in range(size))


def path_ns(problem: PaperProblem, stages: Stages) -> int:
    """Length of the path through the groups in this order."""
    return sum(matching(problem, a, b)[0] for a, b in pairwise(stages))


def shortest_path(problem: PaperProblem, stages: Stages) -> Stages:
    """The groups in the order whose path is shortest; unchanged above `EXACT_PATH_STAGES`.

    Of a path and its reverse, the one that starts with the lower peer.
    """
    count = len(stages)
    if count > EXACT_PATH_STAGES:
        return stages
    edges = [[matching(problem, a, b)[0] if a is not b else 0 for b in stages] for a in stages]
    best: dict[tuple[int, int], tuple[int, int]] = {(1 << at, at): (0, -1) for at in range(count)}
    for visited in range(1, 1 << count):
        for last in range(count):
            if (visited, last) not in best:
                continue
            length = best[visited, last][0]
            for after in range(count):
                if visited >> after & 1:
                    continue
                key = (visited | 1 << after, after)
                offer = (length + edges[last][after], last)
                if key not in best or offer < best[key]:
                    best[key] = offer
    visited = (1 << count) - 1
    last = min(range(count), key=lambda at: (best[visited, at][0], at))
    order: list[int] = []
    while last >= 0:
        order.append(last)
        before = best[visited, last][1]
        visited ^= 1 << last
        last = before
    return tuple(stages[at] for at in order)


def paper_plan(problem: PaperProblem, stages: Stages) -> PaperPlan:
    """The plan of a placement in its best path order, in a canonical form."""
    ordered = shortest_path(problem, tuple(tuple(sorted(group)) for group in stages))
    if min(ordered[-1]) < min(ordered[0]):
        ordered = ordered[::-1]
    chains = [list(ordered[0])]
    for before, after in pairwise(ordered):
        _, partners = matching(problem, before, after)
        follows = dict(zip(before, partners, strict=True))
        chains.append([follows[peer] for peer in chains[-1]])
    names = problem.peer_ids
    return PaperPlan(
        stages=tuple(tuple(names[peer] for peer in group) for group in ordered),
        pipelines=tuple(tuple(names[peer] for peer in c) for c in zip(*chains, strict=True)),
        data_parallel_ns=data_parallel_ns(problem, ordered),
        pipeline_ns=2 * path_ns(problem, ordered),
    )
