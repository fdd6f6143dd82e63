"""A whole step, message by message: the last judge of the planner's finalists, and the base of the
simulator in `sim`.

For few peers this takes no longer than the search for the plan does. It has streams, turns,
reduction as layers become final, guardians of a lone pipeline, and then a Prepared from every peer
to every other.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from p2p_dtfm.core.cost_model.guarding import Guarded
from p2p_dtfm.core.cost_model.pipeline_timing import (
    Began,
    Choose,
    Event,
    Hooks,
    PipelinesAtWork,
    StageAtWork,
    TimedPipeline,
    in_turns,
)
from p2p_dtfm.core.cost_model.placement_problem import UNLIMITED_BYTES_PER_S, PlanningProblem
from p2p_dtfm.core.cost_model.reduction_timing import Reduction
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS
from p2p_dtfm.core.virtual.exchange import ShardedExchange, chunk_count
from p2p_dtfm.core.virtual.virtual_network import NetworkLines, TransferNetwork
from p2p_dtfm.core.virtual.virtual_time import NEVER_NS, TooLate, VirtualTime

Contribution = tuple[int, Callable[[int], None]]
"""How long before the end of a peer's last part one of its gradients is final, and `set_out(peer)`,
which is called then."""


@dataclass(frozen=True, slots=True)
class StepEnds:
    """Ends, counted from the start of the step."""

    computed_ns: int
    """The end of the last backward."""
    reduced_ns: int
    committed_ns: int


class StepAtWork:
    """A step in virtual time. Reductions use its `time` and `network`, and call `note_ready`."""

    def __init__(
        self,
        lines: NetworkLines,
        boundary_bytes: int,
        guarded: Sequence[Guarded] = (),
        limit_ns: int = NEVER_NS,
    ) -> None:
        """`guarded`: what holders send to the guardians that Prepared waits for."""
        self.time = VirtualTime(limit_ns)
        self.network = TransferNetwork(self.time, lines, MESSAGE_NS)
        self.computed_ns = 0
        self.ready_ns: dict[int, int] = {}
        """When each peer has all that its Prepared needs, as far as is known."""
        self._latency_ns = lines.latency_ns
        self._boundary_bytes = boundary_bytes
        self._guarded = guarded

    def begin(
        self,
        pipelines: Sequence[TimedPipeline],
        contributions: Mapping[int, Sequence[Contribution]],
        began: Began | None = None,
        done: Callable[[int], None] | None = None,
        choose: Choose = in_turns,
    ) -> None:
        """Begins all pipelines. Each contribution of a peer sets out when it is final; `done(peer)`
        is called when all of them are."""

        def last_part(stage: StageAtWork, count: int, end_ns: int) -> None:
            for below_ns, set_out in contributions.get(stage.peer, ()):
                self.time.at(end_ns - count * below_ns, set_out, stage.peer)

        def stage_done(stage: StageAtWork) -> None:
            self.computed(stage.peer)
            if done is not None:
                done(stage.peer)

        hooks = Hooks(stage_done, last_part, began)
        PipelinesAtWork(self.time, pipelines, self._send, hooks, choose)

    def _send(self, origin: StageAtWork, to: StageAtWork, arrived: Event) -> None:
        if to.position > origin.position:
            size_bytes = origin.timing.out_bytes
        else:
            size_bytes = to.timing.back_bytes
        size_bytes = size_bytes or self._boundary_bytes
        self.network.send(origin.peer, to.peer, size_bytes, arrived, to, urgent=True)

    def computed(self, peer: int) -> None:
        """Notes that the peer's own gradients are whole now, and sends them to its guardians."""
        self.computed_ns = self.time.now_ns
        self.note_ready(peer)
        for each in self._guarded:
            if each.holder == peer:
                self.network.send(peer, each.guardian, each.size_bytes, self._note_guarded, each)

    def note_ready(self, peer: int) -> None:
        """Notes that, as far as is known, the peer has all sums, or nothing to wait for, now."""
        if self.time.now_ns > self.time.limit_ns:
            raise TooLate
        self.ready_ns[peer] = max(self.ready_ns.get(peer, 0), self.time.now_ns)

    def _note_guarded(self, each: Guarded) -> None:
        """The guardian has all gradients; its receipt is on its way."""
        back_ns = each.round_trip_ns - self._latency_ns(each.holder, each.guardian)
        held_up_ns = self.ready_ns[each.holder]
        self.ready_ns[each.holder] = max(held_up_ns, self.time.now_ns + back_ns)

    def run(self) -> int:
        """Runs the step; returns when the last peer has all that its Prepared needs."""
        self.time.run()
        return max(self.ready_ns.values())

    def committed_ns(self) -> int:
        """When the last peer has the Prepared of every other peer."""
        last_ns = max(self.ready_ns.values())
        for peer, sent_ns in self.ready_ns.items():
            for other in self.ready_ns:
                if other != peer:
                    last_ns = max(last_ns, sent_ns + self._latency_ns(peer, other))
        return last_ns


def least_ns(pipelines: Sequence[TimedPipeline]) -> int:
    """A lower bound on a step of these pipelines: each stage waits for its first input, computes,
    and its last gradient goes back to the first stage."""
    least = 0
    for pipeline in pipelines:
        before = after = 0
        for stage in pipeline.stages:
            own = pipeline.microbatches * (stage.forward_ns + stage.backward_ns)
            last_gradient = own - pipeline.microbatches * stage.weight_ns + after
            least = max(least, before + own, before + last_gradient)
            before += stage.forward_ns + stage.out_ns + stage.out_latency_ns
            after += stage.backward_ns - stage.weight_ns + stage.back_ns + stage.back_latency_ns
    return least


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
    limit_ns: int = NEVER_NS,
) -> StepEnds:
    """The ends of a step. `segments` have two or more holders each; weights are parallel to these.
    `guarded`: what is sent to the guardians that Prepared waits for, if there is one pipeline.
    Raises `TooLate` as soon as it is sure that the step ends after `limit_ns`."""
    step = StepAtWork(_lines_of(problem), problem.step.boundary_bytes, guarded, limit_ns)
    contributions: dict[int, list[Contribution]] = {}
    for segment in segments:
        exchange = ShardedExchange(
            step.network, segment.holders, segment.weights, segment.size_bytes, step.note_ready
        )
        below = segment.below_ns or (0,) * len(segment.holders)
        for peer, below_ns in zip(segment.holders, below, strict=True):
            contributions.setdefault(peer, []).append((below_ns, exchange.contribute))
    step.begin(pipelines, contributions)
    reduced_ns = step.run()
    return StepEnds(step.computed_ns, reduced_ns, step.committed_ns())


def _lines_of(problem: PlanningProblem) -> NetworkLines:
    count, watchers = problem.peer_count, problem.watchers

    def link(origin: int, to: int) -> tuple[int, int]:
        if to >= count:
            round_trip_ns = watchers.round_trip_ns[origin][to - count]
            return round_trip_ns // 2, watchers.bytes_per_s[origin][to - count]
        return problem.links.latency_ns[origin][to], problem.links.bytes_per_s[origin][to]

    watching = watchers.downlink_bytes_per_s
    uplinks, downlinks = (
        [0 if rate >= UNLIMITED_BYTES_PER_S else rate for rate in rates]
        for rates in (
            (*problem.links.uplink_bytes_per_s, *(UNLIMITED_BYTES_PER_S for _ in watching)),
            (*problem.links.downlink_bytes_per_s, *watching),
        )
    )
    return NetworkLines(link, uplinks, downlinks)
