"""A plan's stages as the simulator sees them: who computes for how long and sends how much."""

from dataclasses import dataclass

from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.workload import Workload
from p2p_dtfm.sim.execution import Execution, wire_bytes
from p2p_dtfm.sim.scenario import Scenario
from p2p_dtfm.sim.scenario_snapshot import flops_of, layer_timing


@dataclass(slots=True)
class StageWork:
    """One stage: its peer (a number in the scenario's order) and a microbatch's times."""

    peer: int
    name: str
    pipeline: int
    position: int
    last: bool
    microbatches: int
    in_flight: int
    forward_ns: int
    backward_ns: int


@dataclass(frozen=True, slots=True)
class SegmentWork:
    """One segment: the peers that hold it, in pipeline order, and the bytes that they reduce."""

    first_layer: int
    holders: tuple[int, ...]
    gradient_bytes: int


@dataclass(frozen=True, slots=True)
class StepWork:
    """All of a step."""

    pipelines: tuple[tuple[StageWork, ...], ...]
    segments: tuple[SegmentWork, ...]
    boundary_bytes: int


def step_work(
    plan: Plan,
    scenario: Scenario,
    workload: Workload,
    execution: Execution,
    measured_flops: int | None = None,
) -> StepWork:
    """What each stage of the plan does in one step. `workload` counts values, not wire bytes."""
    numbers = {peer.name: number for number, peer in enumerate(scenario.peers)}
    pipelines = []
    for index, pipeline in enumerate(plan.pipelines):
        stages = []
        for position, stage in enumerate(pipeline.stages):
            flops = flops_of(scenario.peer(stage.peer_id), measured_flops)
            times = [layer_timing(workload.cost(x), flops, execution) for x in stage.layers]
            stages.append(
                StageWork(
                    peer=numbers[stage.peer_id],
                    name=stage.peer_id,
                    pipeline=index,
                    position=position,
                    last=position == len(pipeline.stages) - 1,
                    microbatches=pipeline.microbatch_count,
                    in_flight=stage.in_flight,
                    forward_ns=sum(time.forward_ns for time in times),
                    backward_ns=sum(time.backward_ns for time in times),
                )
            )
        pipelines.append(tuple(stages))
    segments = tuple(
        SegmentWork(
            segment.first_layer,
            tuple(numbers[holder] for holder in segment.holders),
            wire_bytes(
                sum(workload.cost(layer).parameter_count for layer in segment.layers),
                execution.gradient_codec,
            ),
        )
        for segment in plan.segments()
    )
    boundary = wire_bytes(workload.boundary_bytes // 4, execution.activation_codec)
    return StepWork(tuple(pipelines), segments, boundary)
