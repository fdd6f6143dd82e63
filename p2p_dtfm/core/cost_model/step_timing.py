"""A whole step of a plan, message by message, by the rules of the simulator.

For few peers this takes no longer than the search for the plan does; then the planner's last word
on its finalists is what the simulator would say, shared uplinks and all. Streams, turns, weighted
reduction as stages finish, then a Prepared from everyone to everyone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2p_dtfm.core.cost_model.guarding import Guarded
from p2p_dtfm.core.cost_model.pipeline_timing import StageTiming
from p2p_dtfm.core.cost_model.placement_problem import (
    MESSAGE_NS,
    UNLIMITED_BYTES_PER_S,
    PlanningProblem,
)
from p2p_dtfm.core.cost_model.reduction_timing import Reduction
from p2p_dtfm.core.virtual.exchange import ShardedExchange, chunk_count
from p2p_dtfm.core.virtual.virtual_network import Lines, VirtualNetwork
from p2p_dtfm.core.virtual.virtual_time import VirtualTime


@dataclass(frozen=True, slots=True)
class TimedPipeline:
    """Its peers in order, what each does for a microbatch, and how many of these there are."""

    peers: tuple[int, ...]
    stages: tuple[StageTiming, ...]
    microbatches: int


@dataclass(frozen=True, slots=True)
class StepEnds:
    """From the start of the step."""

    computed_ns: int
    """The last backward."""
    reduced_ns: int
    committed_ns: int


def event_count(pipelines: Sequence[TimedPipeline], segments: Sequence[Reduction]) -> int:
    """About how many events a step has."""
    tasklets = sum(
        (4 + (stage.weight_ns > 0)) * each.microbatches
        for each in pipelines
        for stage in each.stages
    )
    messages = sum(
        2 * (len(each.holders) - 1) * sum(map(chunk_count, each.part_bytes())) for each in segments
    )
    return tasklets + messages


def step_ends(
    problem: PlanningProblem,
    pipelines: Sequence[TimedPipeline],
    segments: Sequence[Reduction],
    guarded: Sequence[Guarded] = (),
) -> StepEnds:
    """`segments` are those with two or more holders; weights are parallel to holders. `guarded`:
    for whose guardians Prepared waits, if there is one pipeline."""
    return _Step(problem, pipelines, segments, guarded).run()


class _Stage:
    __slots__ = ("backward_was_last", "backwards", "busy", "forwards", "held", "left", "next",
                 "owed", "peer", "previous", "timing")  # fmt: skip

    def __init__(self, peer: int, timing: StageTiming, microbatches: int) -> None:
        self.peer = peer
        self.timing = timing
        self.forwards = self.backwards = 0
        """Whose input, or output's gradient, is here and which did not run yet."""
        self.held = 0
        self.left = microbatches
        """Backwards to do."""
        self.owed = 0
        """Backwards of which the rest is left to do."""
        self.busy = self.backward_was_last = False
        self.previous: _Stage | None = None
        self.next: _Stage | None = None


class _Step:
    def __init__(
        self,
        problem: PlanningProblem,
        pipelines: Sequence[TimedPipeline],
        segments: Sequence[Reduction],
        guarded: Sequence[Guarded],
    ) -> None:
        self.problem = problem
        self.time = VirtualTime()
        self.network = VirtualNetwork(self.time, _lines_of(problem), MESSAGE_NS)
        self.guarded = guarded
        self.exchanges: dict[int, list[tuple[int, ShardedExchange]]] = {}
        """Of each peer, with how long before its end each can begin."""
        for segment in segments:
            exchange = ShardedExchange(
                self.network, segment.holders, segment.weights, segment.size_bytes, self._has_sum
            )
            below = segment.below_ns or (0,) * len(segment.holders)
            for peer, below_ns in zip(segment.holders, below, strict=True):
                self.exchanges.setdefault(peer, []).append((below_ns, exchange))
        self.computed_ns = 0
        self.reduced_ns: dict[int, int] = {}
        self.firsts = [self._chained(pipeline) for pipeline in pipelines]

    def run(self) -> StepEnds:
        for first in self.firsts:
            first.forwards = first.left
            self._pick(first)
        self.time.run()
        reduced = max(self.reduced_ns.values())
        latency = self.problem.latency_ns
        committed = max(
            (sent + latency[peer][other]
             for peer, sent in self.reduced_ns.items() for other in self.reduced_ns),
            default=reduced,
        )  # fmt: skip
        return StepEnds(self.computed_ns, reduced, max(reduced, committed))

    def _chained(self, pipeline: TimedPipeline) -> _Stage:
        stages = [
            _Stage(peer, timing, pipeline.microbatches)
            for peer, timing in zip(pipeline.peers, pipeline.stages, strict=True)
        ]
        for here, there in pairwise(stages):
            here.next, there.previous = there, here
        return stages[0]

    def _pick(self, stage: _Stage) -> None:
        forward = stage.forwards > 0 and stage.held < stage.timing.in_flight
        if stage.backwards and not (forward and stage.backward_was_last):
            stage.backwards -= 1
            stage.backward_was_last = True
            duration = stage.timing.backward_ns - stage.timing.weight_ns
            if stage.left == 1 and not stage.timing.weight_ns:
                self._layers_end(stage, duration, 1)
        elif forward:
            stage.forwards -= 1
            stage.held += 1
            stage.backward_was_last, duration = False, stage.timing.forward_ns
        elif stage.owed:
            self._settle(stage)
            return
        else:
            return
        stage.busy = True
        self.time.at(self.time.now_ns + duration, self._ran, stage)

    def _settle(self, stage: _Stage) -> None:
        """What a backward has left; in the end all that is left, layer by layer."""
        count = 1 if stage.left else stage.owed
        stage.busy = True
        stage.owed -= count
        stage.held -= count - 1
        duration = count * stage.timing.weight_ns
        if not stage.left:
            self._layers_end(stage, duration, count)
        self.time.at(self.time.now_ns + duration, self._settled, stage)

    def _settled(self, stage: _Stage) -> None:
        stage.busy = False
        stage.held -= 1
        if not stage.left and not stage.owed:
            self._done(stage.peer)
        self._pick(stage)

    def _layers_end(self, stage: _Stage, duration: int, count: int) -> None:
        """The last part of the last `count` microbatches begins: layers are final on the way."""
        end = self.time.now_ns + duration
        for below_ns, exchange in self.exchanges.get(stage.peer, ()):
            self.time.at(end - count * below_ns, exchange.contribute, stage.peer)

    def _ran(self, stage: _Stage) -> None:
        stage.busy = False
        if stage.backward_was_last:
            splits = stage.timing.weight_ns > 0
            stage.held -= 0 if splits else 1
            stage.owed += 1 if splits else 0
            stage.left -= 1
            if stage.previous is not None:
                self._send(stage, stage.previous, self._gradient_arrived)
            if not stage.left and not splits:
                self._done(stage.peer)
        elif stage.next is None:
            stage.backwards += 1
        else:
            self._send(stage, stage.next, self._input_arrived)
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

    def _done(self, peer: int) -> None:
        """Its gradients are whole."""
        self.computed_ns = self.time.now_ns
        self.reduced_ns[peer] = max(self.reduced_ns.get(peer, 0), self.time.now_ns)
        for each in self.guarded:
            if each.holder == peer:
                self.network.send(peer, each.guardian, each.size_bytes, self._guarded, each)

    def _guarded(self, each: Guarded) -> None:
        """The guardian has all; its receipt is on its way."""
        back = each.round_trip_ns - _one_way_ns(self.problem, each.holder, each.guardian)
        held_up = self.reduced_ns[each.holder]
        self.reduced_ns[each.holder] = max(held_up, self.time.now_ns + back)

    def _has_sum(self, peer: int) -> None:
        self.reduced_ns[peer] = self.time.now_ns


def _one_way_ns(problem: PlanningProblem, origin: int, to: int) -> int:
    if to >= problem.peer_count:
        return problem.watchers.round_trip_ns[origin][to - problem.peer_count] // 2
    return problem.latency_ns[origin][to]


def _lines_of(problem: PlanningProblem) -> Lines:
    def link(origin: int, to: int) -> tuple[int, int]:
        latency_ns = _one_way_ns(problem, origin, to)
        if to >= problem.peer_count:
            return latency_ns, problem.watchers.bytes_per_s[origin][to - problem.peer_count]
        return latency_ns, problem.bytes_per_s[origin][to]

    watching = problem.watchers.downlink_bytes_per_s
    uplinks, downlinks = (
        [0 if rate >= UNLIMITED_BYTES_PER_S else rate for rate in rates]
        for rates in (
            (*problem.uplink_bytes_per_s, *(UNLIMITED_BYTES_PER_S for _ in watching)),
            (*problem.downlink_bytes_per_s, *watching),
        )
    )
    return Lines(link, uplinks, downlinks)
