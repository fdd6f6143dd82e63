"""A plan's stages as the simulator sees them: who computes for how long and sends how much."""

from dataclasses import dataclass

from p2p_dtfm.core.cost_model.pipeline_timing import StageTiming, TimedPipeline
from p2p_dtfm.core.protocol.plan import Plan, Segment
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.schedule.pieces import pieces_of
from p2p_dtfm.core.schedule.tasklets import weight_part_ns
from p2p_dtfm.sim.scenario.execution import Execution, wire_bytes
from p2p_dtfm.sim.scenario.scenario import Scenario
from p2p_dtfm.sim.scenario.scenario_snapshot import flops_of, layer_timing


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage: its peer (a number in the scenario's order) and a microbatch's times."""

    peer: int
    name: str
    pipeline: int
    position: int
    microbatches: int
    timing: StageTiming
    below_ns: dict[int, int]
    """By layer at which a gradient may set out: how much of the last part of a microbatch (what a
    split leaves of the backward, else all of it) comes after the layer's."""


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

    pipelines: tuple[tuple[StageWork, ...], ...]
    segments: tuple[SegmentWork, ...]
    boundary_bytes: int

    def timed(self) -> list[TimedPipeline]:
        return [
            TimedPipeline(
                tuple(stage.peer for stage in stages),
                tuple(stage.timing for stage in stages),
                stages[0].microbatches,
            )
            for stages in self.pipelines
        ]


def step_work(
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    execution: Execution,
    measured_flops: int | None = None,
) -> StepWork:
    """What each stage of the plan does in one step. `workload` counts values, not wire bytes."""
    numbers = {peer.name: number for number, peer in enumerate(scenario.peers)}
    segments = tuple(
        SegmentWork(
            segment.first_layer,
            piece.start,
            tuple(numbers[holder] for holder in segment.holders),
            wire_bytes(_elements(workload, piece), execution.gradient_codec),
        )
        for segment in plan.segments()
        for piece in _pieces(segment, workload, execution)
    )
    starts = {segment.first_layer for segment in segments}
    pipelines = []
    for index, pipeline in enumerate(plan.pipelines):
        stages = []
        for position, stage in enumerate(pipeline.stages):
            flops = flops_of(scenario.peer(stage.peer_id), measured_flops)
            times = {x: layer_timing(workload.cost(x), flops, execution) for x in stage.layers}
            backward = {x: timing.backward_ns for x, timing in times.items()}
            splits = execution.splits and position > 0
            weight = {
                x: weight_part_ns(timing.forward_ns, timing.backward_ns) if splits else 0
                for x, timing in times.items()
            }
            last_part = weight if splits else backward
            stages.append(
                StageWork(
                    peer=numbers[stage.peer_id],
                    name=stage.peer_id,
                    pipeline=index,
                    position=position,
                    microbatches=pipeline.microbatch_count,
                    timing=StageTiming(
                        forward_ns=sum(timing.forward_ns for timing in times.values()),
                        backward_ns=sum(backward.values()),
                        in_flight=stage.in_flight,
                        weight_ns=sum(weight.values()),
                    ),
                    below_ns={
                        x: sum(last_part[y] for y in range(stage.first_layer, x))
                        for x in stage.layers
                        if x in starts
                    },
                )
            )
        pipelines.append(tuple(stages))
    boundary = wire_bytes(workload.boundary_bytes // 4, execution.activation_codec)
    return StepWork(tuple(pipelines), segments, boundary)


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


def _elements(workload: Workload, layers: range) -> int:
    return sum(workload.cost(layer).parameter_count for layer in layers)
