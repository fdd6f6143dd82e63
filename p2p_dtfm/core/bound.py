"""A time that no plan's step can beat: what plans are measured against where no optimum is known.

Let T be the length of a step. Every microbatch passes every block on some peer, and a peer is done
within T, so with m microbatches, B blocks and c_i the time of a block on peer i:

    sum over the peers that hold a stage of T / c_i  >=  m B

Either there is one pipeline, which has at most as many stages as layers; then only the fastest so
many peers count. Or every layer has several holders, and each of them sends its gradient of at
least one layer, of g bytes or more, over its uplink (or receives as much); then only peers count
that can do so within T:  g <= T min(uplink, downlink, all their links together).
"""

from p2p_dtfm.core.problem import Problem

_RATE_SCALE = 1 << 80


def step_lower_bound_ns(problem: Problem) -> int:
    """The least T that satisfies one of the two conditions, rounded down."""
    return min(_one_pipeline_ns(problem), _several_pipelines_ns(problem))


def _one_pipeline_ns(problem: Problem) -> int:
    rates = sorted((_RATE_SCALE // t.block_ns for t in problem.layer_ns), reverse=True)
    work = problem.microbatch_count * problem.block_count
    return work * _RATE_SCALE // (sum(rates[: problem.layer_count]) + len(rates))


def _several_pipelines_ns(problem: Problem) -> int:
    """Peers join in the order in which they can send one layer; each makes computing shorter."""
    work = problem.microbatch_count * problem.block_count
    smallest = min(
        layer.gradient_bytes for layer in (problem.embedding, problem.block, problem.head)
    )
    joining = sorted(
        (smallest * 1_000_000_000 // _reach(problem, peer), _RATE_SCALE // times.block_ns + 1)
        for peer, times in enumerate(problem.layer_ns)
    )
    best, rate = 1 << 80, 0
    for ready_ns, added in joining:
        rate += added
        best = min(best, max(ready_ns, work * _RATE_SCALE // rate))
    return best


def _reach(problem: Problem, peer: int) -> int:
    """Bytes per second that a peer can send and receive at most."""
    links = sum(rate for other, rate in enumerate(problem.bytes_per_s[peer]) if other != peer)
    back = sum(row[peer] for other, row in enumerate(problem.bytes_per_s) if other != peer)
    limits = (problem.uplink_bytes_per_s[peer], problem.downlink_bytes_per_s[peer], links, back)
    return max(1, min(limits))
