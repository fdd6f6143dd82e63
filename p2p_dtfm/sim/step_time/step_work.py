"""A plan's stages as the simulator sees them: which peer computes for how long and sends how
much."""

from dataclasses import dataclass

from p2p_dtfm.core.cost_model.codings import Edges, coding_ns, edges_of, tensor_bytes
from p2p_dtfm.core.cost_model.pipeline_timing import StageTiming, TimedPipeline
from p2p_dtfm.core.cost_model.tables.layer_tables import kinds_in, layer_ns_of
from p2p_dtfm.core.cost_model.tables.link_tables import MESSAGE_NS, duration_ns
from p2p_dtfm.core.planner.recomputation import stage_recomputes
from p2p_dtfm.core.protocol.plan import Pipeline, Plan, Segment
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.schedule.pieces import pieces_of
from p2p_dtfm.sim.scenario.execution import Execution
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import activation_bytes, device_of, reduced_bytes


@dataclass(frozen=True, slots=True)
class SimulatedStage:
    """One stage: its peer (a number in the scenario's order) and a microbatch's times."""

    peer: int
    name: str
    pipeline: int
    position: int
    microbatches: int
    timing: StageTiming
    below_ns: dict[int, int]
    """By layer at which a gradient may set out: how much of the last part of a microbatch comes
    after the layer's. That part is what a split leaves of the backward, else all of it."""


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """A segment, or a piece of one that sets out by itself: the peers that hold it, in pipeline
    order, and the bytes that they reduce. `first_layer` is final last."""

    segment: int
    """The segment's first layer."""
    first_layer: int
    holders: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """All of a step."""

    pipelines: tuple[tuple[SimulatedStage, ...], ...]
    segments: tuple[SegmentWork, ...]
    boundary_bytes: int
    inner_steps: int = 0
    ends_meet_ns: int = 0
    """The time until the ends of every pipeline have exchanged the sums of a tied matrix."""

    def timed(self) -> list[TimedPipeline]:
        return [
            TimedPipeline(
                tuple(stage.peer for stage in stages),
                tuple(stage.timing for stage in stages),
                stages[0].microbatches,
                self.inner_steps,
            )
            for stages in self.pipelines
        ]


def step_work(
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    execution: Execution,
) -> StepWork:
    """What each stage of the plan does in one step. `workload` counts values, not wire bytes."""
    numbers = {peer.name: number for number, peer in enumerate(scenario.peers)}
    segments = tuple(
        SegmentWork(
            segment.first_layer,
            piece.start,
            tuple(numbers[holder] for holder in segment.holders),
            reduced_bytes(workload, piece, execution),
        )
        for segment in plan.segments()
        for piece in _pieces(segment, workload, execution)
    )
    starts = {segment.first_layer for segment in segments}
    pipelines = []
    for index, pipeline in enumerate(plan.pipelines):
        stages = []
        edges = _edges(pipeline, workload, execution)
        for position, stage in enumerate(pipeline.stages):
            peer = scenario.peer(stage.peer_id)
            device = device_of(peer, workload, execution)
            times = layer_ns_of(device, workload)
            first, end, count = stage.first_layer, stage.end_layer, workload.layer_count
            kinds = kinds_in(first, end, count)
            again = execution.recompute is None and stage_recomputes(workload, plan, stage, device)
            splits = _may_split(workload, execution) and position > 0 and not again
            below_ns = {
                x: 0
                if workload.inner_steps
                else times.last_part_ns(kinds_in(first, x, count), splits)
                for x in reversed(stage.layers)  # last layers first, as a backward ends them
                if x in starts
            }
            forward_ns = times.forward_ns(kinds)
            coded = coding_ns(edges, position, times.block_forward_ns)
            out_bytes, back_bytes = tensor_bytes(edges, position)
            timing = StageTiming(
                forward_ns + coded[0],
                times.backward_ns(kinds) + (forward_ns if again else 0) + coded[1],
                stage.in_flight,
                weight_ns=times.last_part_ns(kinds, splits) if splits else 0,
                update_ns=times.update_ns(kinds, workload.block_update_ppm),
                out_bytes=out_bytes,
                back_bytes=back_bytes,
            )
            place = numbers[stage.peer_id], stage.peer_id, index, position
            stages.append(SimulatedStage(*place, pipeline.microbatch_count, timing, below_ns))
        pipelines.append(tuple(stages))
    boundary = activation_bytes(workload, execution)
    ends_meet_ns = _ends_meet_ns(plan, scenario, workload)
    return StepWork(tuple(pipelines), segments, boundary, workload.inner_steps, ends_meet_ns)


def _ends_meet_ns(plan: Plan, scenario: Scenario, workload: Workload) -> int:
    """The time for that exchange, after the reduction, as the planner counts it
    (`PlanningProblem.ends_meet_ns`)."""
    shared_bytes, longest_ns = workload.head.shared_bytes, 0
    for pipeline in plan.pipelines if shared_bytes else ():
        ends = (pipeline.stages[0].peer_id, pipeline.stages[-1].peer_id)
        for one, other in (ends, ends[::-1]) if len(pipeline.stages) > 1 else ():
            bytes_per_s = scenario.transfer_bytes_per_s(one, other)
            sent_ns = MESSAGE_NS + duration_ns(shared_bytes, bytes_per_s)
            longest_ns = max(longest_ns, scenario.link(one, other).latency_ns + sent_ns)
    return longest_ns


def _may_split(workload: Workload, execution: Execution) -> bool:
    """Whether backwards may be split. A frozen base has no gradients to put off, and unlike layers
    need have no matrices."""
    return execution.splits and not workload.block.backward_flops and workload.unlike is None


def _edges(pipeline: Pipeline, workload: Workload, execution: Execution) -> Edges:
    """The codecs in which boundaries are crossed, unless the execution has one for all."""
    return edges_of(workload, pipeline) if execution.activation_codec is None else ()


def _pieces(segment: Segment, workload: Workload, execution: Execution) -> list[range]:
    """The layers of each part of a segment that sets out by itself."""
    if execution.overlap != "layer" or len(segment.holders) == 1:
        return [segment.layers]
    lengths = [workload.cost(layer).parameter_count for layer in segment.layers]
    first = segment.first_layer
    return [
        range(first + piece.start, first + piece.stop)
        for piece in pieces_of(lengths, len(segment.holders))
    ]
