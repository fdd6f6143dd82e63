"""Times that no plan's step can beat: what plans are measured against where no optimum is known.

`step_lower_bound_ns`, for every plan. Let T be the length of a step, m its microbatches, B the
blocks, c_i the time of a block on peer i, g a block's gradient and a an activation in bytes. Either
there is one pipeline. It has at most as many stages as layers, so only that many of the fastest
peers count. Or every layer has h >= 2 holders. A holder that owns the part w of the sums sends
(1 - w) of its gradient and (h - 1) w of sums: no less than its gradient in all. What belongs to its
lowest k blocks it sends after its last backward has come down to them. That is (k - 1) b before the
end, b being a block's backward. So a peer with x blocks that sends (and receives) at most R_i bytes
per second ends computing at least z_i = max(g / R_i, x g / R_i - (x - 1) b_i) before T. Where
stages leave a part of their backwards for last, only g / R_i is sure. Unless a peer holds the whole
model, each of its microbatches sends an activation or its gradient over one link of at most r_i
bytes per second. With u_i the work of peer i, in blocks of a microbatch:

    u_i = max over 1 <= x <= what fits of  min((T - z_i) / c_i,  x T r_i / a)

and T is the least for which the sum of u_i is m B.

`grid_lower_bound_ns`, for grids: P pipelines of S stages each, cut alike, microbatches dealt at
will, on any peers, which all count as fast as the fastest. There are n = m / P microbatches on
average (time is concave in them, so unequal shares do not help), x_s blocks in stage s and X_s
before it. f and b are a block's forward and backward, d the shortest latency and transmission of
any pair:

    ended  >= X_s (f + b') + 2 s d + n x_s (f + b)       for each s: fill, work, drain
    ended_s >= X_s f + s d + n x_s (f + b)               when stage s itself has ended
    reduced >= ended + reduction(x_0),  ended_s + reduction(x_s)
    step   >= reduced + the least latency to the farthest of the others (Prepared)

b' is the part of a backward that the stage before waits for: all of it, or only the input's
gradient where stages split backwards. reduction(x) is z as above, with the following for x g / R.

Reduction of G bytes among P holders: the link a -> b carries w_b of a's gradient after a has ended,
and w_a of sums, so (w_a + w_b) G <= r_ab (T - ended_a). Add this up over all pairs, with R the
fastest that any peer sends to P - 1 others: T - ended is on average at least 2 (P - 1) G / (P R).
Add it up only over pairs no faster than r, of which each holder has all but k: it is at least
2 (P - 1 - k) G / (P (P - 1) r).
"""

from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem
from p2p_dtfm.core.cost_model.tables.link_tables import duration_ns
from p2p_dtfm.core.schedule.tasklets import weight_part_ns

_RATE_SCALE = 1 << 80


def step_lower_bound_ns(problem: PlanningProblem) -> int:
    """The least T that either one pipeline or several satisfy, rounded down. For unlike layers no
    such bound is known."""
    assert not problem.layers.unlike
    return min(_one_pipeline_ns(problem), _several_pipelines_ns(problem))


def _one_pipeline_ns(problem: PlanningProblem) -> int:
    rates = sorted((_RATE_SCALE // t.block_ns for t in problem.devices.layer_ns), reverse=True)
    work = problem.step.microbatch_count * problem.layers.block_count
    return work * _RATE_SCALE // (sum(rates[: problem.layer_count]) + len(rates))


def _several_pipelines_ns(problem: PlanningProblem) -> int:
    """The bound for several pipelines, by bisection: more time lets every peer do more."""
    wanted = problem.step.microbatch_count * problem.layers.block_count << 20
    peers = [_Reach(problem, peer) for peer in range(problem.peer_count)]
    low, high = 0, 1
    while sum(peer.work_q20(high) for peer in peers) < wanted:
        low, high = high, 2 * high
    while high - low > max(1, high >> 10):
        middle = (low + high) // 2
        if sum(peer.work_q20(middle) for peer in peers) < wanted:
            low = middle
        else:
            high = middle
    return low


class _Reach:
    """What one peer can do at most within a given time."""

    def __init__(self, problem: PlanningProblem, peer: int) -> None:
        links = problem.links
        out = [rate for other, rate in enumerate(links.bytes_per_s[peer]) if other != peer]
        back = [row[peer] for other, row in enumerate(links.bytes_per_s) if other != peer]
        limit = min(links.uplink_bytes_per_s[peer], links.downlink_bytes_per_s[peer])
        everything = max(1, min(limit, sum(out), sum(back)))
        times = problem.devices.layer_ns[peer]
        self.block_ns = times.block_ns
        self.backward_ns = None if problem.step.splits_backwards else times.block_backward_ns
        self.gradient_ns = duration_ns(problem.layers.block.gradient_bytes, everything)
        self.activation_ns = duration_ns(
            problem.step.boundary_bytes, max(1, min(limit, max([*out, *back], default=1)))
        )
        block = problem.layers.block.needed_bytes
        fitting = problem.devices.memory_bytes[peer] // max(1, block)
        self.whole = fitting >= problem.layers.block_count
        self.most_blocks = min(fitting, problem.layers.block_count)

    def work_q20(self, time_ns: int) -> int:
        """The most work within a time, in blocks of a microbatch times 2^20."""
        best = 0
        carried = (time_ns << 20) // self.activation_ns + 1
        for blocks in range(1, self.most_blocks + 1):
            left_ns = time_ns - _after_ns(blocks, self.gradient_ns, self.backward_ns)
            if left_ns <= 0:
                break
            computed = (left_ns << 20) // self.block_ns + 1
            whole = self.whole and blocks == self.most_blocks
            best = max(best, computed if whole else min(computed, blocks * carried))
        return best


def _after_ns(blocks: int, each_ns: int, backward_ns: int | None) -> int:
    """How long a stage sends after it ends computing; a block's gradient takes `each_ns`."""
    if backward_ns is None:
        return each_ns
    return max(each_ns, blocks * each_ns - (blocks - 1) * backward_ns)


def grid_lower_bound_ns(problem: PlanningProblem) -> int | None:
    """The least step of any grid; None if no grid of these peers holds the model."""
    bounds = [
        bound
        for stages in range(1, min(problem.peer_count, problem.layer_count) + 1)
        if (bound := _Grid(problem, stages).step_ns()) is not None
    ]
    return min(bounds, default=None)


class _Grid:
    """All grids of one depth."""

    def __init__(self, problem: PlanningProblem, stages: int) -> None:
        self.problem = problem
        self.stages = stages
        self.pipelines = problem.peer_count // stages
        fastest = min(problem.devices.layer_ns, key=lambda times: times.block_ns)
        self.forward_ns, self.block_ns = fastest.block_forward_ns, fastest.block_ns
        self.backward_ns: int | None = fastest.block_backward_ns
        self.round_ns = self.block_ns
        if problem.step.splits_backwards:
            self.backward_ns = None
            self.round_ns -= weight_part_ns(fastest.block_forward_ns, fastest.block_backward_ns)
        block = problem.layers.block.needed_bytes
        self.most_blocks = max(problem.devices.memory_bytes) // max(1, block)
        everyone = range(problem.peer_count)
        self.hop_ns = min(
            (problem.links.latency_ns[a][b] + problem.links.transmit_ns[a][b]
             for a in everyone for b in everyone if a != b),
            default=0,
        )  # fmt: skip
        farthest = (
            max(problem.links.latency_ns[a][b] for b in everyone if b != a)
            for a in everyone
            if len(everyone) > 1
        )
        self.commit_ns = min(farthest, default=0)
        self.reduction_ns = self._reduction_ns(problem.layers.block.gradient_bytes)

    def step_ns(self) -> int | None:
        problem = self.problem
        if self.stages * self.most_blocks < problem.layers.block_count:
            return None
        shortest = problem.step.microbatch_count * problem.layers.block_count * self.block_ns
        low = shortest // (self.pipelines * self.stages) - 1
        high = (
            2 * shortest
            + 2 * self.stages * self.hop_ns
            + problem.layers.block_count * (self.reduction_ns + self.block_ns)
        )
        while high - low > max(1, high >> 14):
            middle = (low + high) // 2
            if self._possible(middle):
                high = middle
            else:
                low = middle
        return low + self.commit_ns

    def _possible(self, time_ns: int) -> bool:
        """Whether some cut into stages can be reduced within the time."""
        return any(
            self._covers(first, time_ns)
            for first in range(1, min(self.most_blocks, self.problem.layers.block_count) + 1)
        )

    def _covers(self, first: int, time_ns: int) -> bool:
        """Whether the other stages can hold the rest; each takes as many blocks as it may."""
        ended_ns = time_ns - _after_ns(first, self.reduction_ns, self.backward_ns)
        before = 0
        for stage in range(self.stages):
            left_ns = ended_ns - before * self.round_ns - 2 * stage * self.hop_ns
            own_ns = time_ns - before * self.forward_ns - stage * self.hop_ns
            most = min(
                self._blocks_within(left_ns, 0),
                self._blocks_within(own_ns - self.reduction_ns, 0),
                self.most_blocks,
            )
            if self.backward_ns is not None and self.reduction_ns > self.backward_ns:
                slower_ns = self.reduction_ns - self.backward_ns
                most = min(most, self._blocks_within(own_ns - self.backward_ns, slower_ns))
            if most < 1 or (stage == 0 and most < first):
                return False
            before += first if stage == 0 else most
        return before >= self.problem.layers.block_count

    def _blocks_within(self, time_ns: int, extra_ns: int) -> int:
        """Blocks that a stage computes for its share of the microbatches within a time."""
        work_ns = self.problem.step.microbatch_count * self.block_ns + extra_ns * self.pipelines
        return max(0, time_ns) * self.pipelines // work_ns

    def _reduction_ns(self, size_bytes: int) -> int:
        """Least time to reduce so many bytes, on average from a holder's end to the end of all."""
        count = self.pipelines
        if count < 2:
            return 0
        problem = self.problem
        rows = [
            sorted((rate for b, rate in enumerate(row) if b != a), reverse=True)
            for a, row in enumerate(problem.links.bytes_per_s)
        ]
        uplinks = problem.links.uplink_bytes_per_s
        most = max(min(sum(row[: count - 1]), uplinks[a]) for a, row in enumerate(rows))
        longest = duration_ns(2 * (count - 1) * size_bytes, count * most)
        for rate in {row[at] for row in rows for at in (0, len(row) // 4, len(row) // 2, -1)}:
            faster = max(sum(1 for each in row if each > rate) for row in rows)
            if faster < count - 1:
                pairs = count * (count - 1)
                longest = max(
                    longest, duration_ns(2 * (count - 1 - faster) * size_bytes, pairs * rate)
                )
        return longest
