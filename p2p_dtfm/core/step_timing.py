"""A whole step of a plan, message by message, by the rules of the simulator.

For few peers this takes no longer than the search for the plan does; then the planner's last word
on its finalists is what the simulator would say, shared uplinks and all. Streams, turns, weighted
reduction layer by layer as backwards end, then a Prepared from everyone to everyone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2p_dtfm.core.exchange import ShardedExchange, chunk_count
from p2p_dtfm.core.pipeline_timing import StageTiming
from p2p_dtfm.core.problem import MESSAGE_NS, UNLIMITED_BYTES_PER_S, Problem
from p2p_dtfm.core.reduction_timing import Reduction
from p2p_dtfm.core.split_backward import weight_part_ns
from p2p_dtfm.core.virtual_network import Lines, VirtualNetwork
from p2p_dtfm.core.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """Its peers in order, their layers, what each does for a microbatch, and how many there are."""

    peers: tuple[int, ...]
    cuts: tuple[int, ...]
    stages: tuple[StageTiming, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class Piece:
    """Layers of a segment that set out together, the lowest of which is final last."""

    first_layer: int
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class StepEnds:
    """From the start of the step."""

    computed_ns: int
    """The last backward."""
    reduced_ns: int
    committed_ns: int


def event_count(pipelines: Sequence[TimedPipeline], pieces: Sequence[Piece]) -> int:
    """About how many events a step has."""
    tasklets = sum(4 * len(each.peers) * each.microbatches for each in pipelines)
    messages = sum(
        2 * (len(shared.holders) - 1) * sum(map(chunk_count, shared.part_bytes()))
        for shared in (piece.reduction for piece in pieces)
    )
    return tasklets + messages


def step_ends(
    problem: Problem, pipelines: Sequence[TimedPipeline], pieces: Sequence[Piece]
) -> StepEnds:
    """`pieces` are those with two or more holders; weights are parallel to holders."""
    return _Step(problem, pipelines, pieces).run()


_FORWARD, _BACKWARD = 0, -1
"""What a stage runs; a positive number is how many times what was left for later."""


class _Stage:
    def __init__(
        self, peer: int, timing: StageTiming, microbatches: int, below_ns: dict[int, int]
    ) -> None:
        self.peer = peer
        self.timing = timing
        self.below_ns = below_ns
        """By the first layer of a piece: how much of the last part of a microbatch comes after."""
        self.forwards = self.backwards = 0
        """Whose input, or output's gradient, is here and which did not run yet."""
        self.held = 0
        self.left = microbatches
        """Backwards to do."""
        self.owed = 0
        """Microbatches whose backward left something for later."""
        self.running = _FORWARD
        self.busy = self.backward_was_last = False
        self.previous: _Stage | None = None
        self.next: _Stage | None = None


class _Step:
    def __init__(
        self, problem: Problem, pipelines: Sequence[TimedPipeline], pieces: Sequence[Piece]
    ) -> None:
        self.problem = problem
        self.time = VirtualTime()
        self.network = VirtualNetwork(self.time, _lines_of(problem), MESSAGE_NS)
        self.exchanges: dict[tuple[int, int], ShardedExchange] = {}
        """By holder and first layer."""
        self.starts = {piece.first_layer for piece in pieces}
        for piece in pieces:
            shared = piece.reduction
            exchange = ShardedExchange(
                self.network, shared.holders, shared.weights, shared.size_bytes, self._has_all
            )
            for peer in shared.holders:
                self.exchanges[peer, piece.first_layer] = exchange
        self.computed_ns = 0
        self.reduced_ns: dict[int, int] = {}
        self.firsts = [self._chained(pipeline) for pipeline in pipelines]

    def run(self) -> StepEnds:
        for first in self.firsts:
            first.forwards = first.left
            self._pick(first)
        self.time.run()
        latency, last = self.problem.latency_ns, max(self.reduced_ns.values())
        arrivals = [
            sent + latency[peer][other]
            for peer, sent in self.reduced_ns.items()
            for other in self.reduced_ns
        ]
        return StepEnds(self.computed_ns, last, max(arrivals))

    def _chained(self, pipeline: TimedPipeline) -> _Stage:
        stages = []
        for at, (peer, timing) in enumerate(zip(pipeline.peers, pipeline.stages, strict=True)):
            layers = range(*pipeline.cuts[at : at + 2])
            below_ns = self._below_ns(peer, layers, timing)
            stages.append(_Stage(peer, timing, pipeline.microbatches, below_ns))
        for here, there in pairwise(stages):
            here.next, there.previous = there, here
        return stages[0]

    def _below_ns(self, peer: int, layers: range, timing: StageTiming) -> dict[int, int]:
        times = self.problem.layer_ns[peer]
        below_ns, spent = {}, 0
        for layer in layers:
            if layer in self.starts:
                below_ns[layer] = spent
            both = (times.block_forward_ns, times.block_backward_ns)
            if layer == 0:
                both = (times.embedding_forward_ns, times.embedding_backward_ns)
            elif layer == self.problem.layer_count - 1:
                both = (times.head_forward_ns, times.head_backward_ns)
            spent += weight_part_ns(*both) if timing.weight_ns else both[1]
        return below_ns

    def _pick(self, stage: _Stage) -> None:
        """As `pipeline_order` says."""
        timing, now = stage.timing, self.time.now_ns
        forward = stage.forwards > 0 and stage.held < timing.in_flight
        if stage.backwards and not (forward and stage.backward_was_last):
            stage.backwards -= 1
            stage.backward_was_last, stage.running = True, _BACKWARD
            duration = timing.backward_ns - timing.weight_ns
            if stage.left == 1 and not timing.weight_ns:
                self._layers_end(stage, now + duration, 1)
        elif forward:
            stage.forwards -= 1
            stage.held += 1
            stage.backward_was_last, stage.running = False, _FORWARD
            duration = timing.forward_ns
        elif stage.owed:
            stage.running = 1 if stage.left else stage.owed
            stage.owed -= stage.running
            duration = stage.running * timing.weight_ns
            if not stage.left:
                self._layers_end(stage, now + duration, stage.running)
        else:
            return
        stage.busy = True
        self.time.at(now + duration, self._ran, stage)

    def _layers_end(self, stage: _Stage, end_ns: int, count: int) -> None:
        """The last part of the last `count` microbatches ends then: a layer's comes earlier."""
        for layer, below_ns in stage.below_ns.items():
            if (stage.peer, layer) in self.exchanges:
                self.time.at(end_ns - count * below_ns, self._final, (stage.peer, layer))

    def _final(self, held: tuple[int, int]) -> None:
        """A peer's own gradients of the piece that begins at a layer are whole."""
        self.exchanges[held].contribute(held[0])

    def _ran(self, stage: _Stage) -> None:
        stage.busy = False
        if stage.running > 0:
            stage.held -= stage.running
        elif stage.running == _BACKWARD:
            stage.left -= 1
            if stage.timing.weight_ns:
                stage.owed += 1
            else:
                stage.held -= 1
            if stage.previous is not None:
                self._send(stage, stage.previous, self._gradient_arrived)
        elif stage.next is None:
            stage.backwards += 1
        else:
            self._send(stage, stage.next, self._input_arrived)
        if not stage.left and not stage.held:
            self.computed_ns = self.time.now_ns
            self._has_all(stage.peer)
        self._pick(stage)

    def _send(self, origin: _Stage, to: _Stage, arrived: Callable[[_Stage], None]) -> None:
        size = self.problem.boundary_bytes
        self.network.send(origin.peer, to.peer, size, arrived, to, urgent=True)

    def _input_arrived(self, stage: _Stage) -> None:
        stage.forwards += 1
        if not stage.busy:
            self._pick(stage)

    def _gradient_arrived(self, stage: _Stage) -> None:
        stage.backwards += 1
        if not stage.busy:
            self._pick(stage)

    def _has_all(self, peer: int) -> None:
        """All gradients of its own, or all sums of a piece; the last time counts."""
        self.reduced_ns[peer] = self.time.now_ns


def _lines_of(problem: Problem) -> Lines:
    def link(origin: int, to: int) -> tuple[int, int]:
        return problem.latency_ns[origin][to], problem.bytes_per_s[origin][to]

    uplinks, downlinks = (
        [0 if rate >= UNLIMITED_BYTES_PER_S else rate for rate in rates]
        for rates in (problem.uplink_bytes_per_s, problem.downlink_bytes_per_s)
    )
    return Lines(link, uplinks, downlinks)
