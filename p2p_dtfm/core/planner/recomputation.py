"""Which stages keep only their layers' inputs and run each forward again before its backward.

This costs one more forward for each microbatch, and leaves room for many more in flight (Chen et
al. 2016). Stages do it where their run says so, or where the plan gives them more in flight than
their memory holds otherwise. That is a pure function of snapshot and plan, so all peers know it
alike.
"""

from dataclasses import replace

from p2p_dtfm.core.cost_model.placement_problem import PlanningProblem, problem_of
from p2p_dtfm.core.cost_model.tables.layer_tables import LayerNs, UnlikeNs, unlike_ns
from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.plan import Plan, Stage
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload


def must_recompute(snapshot: Snapshot, plan: Plan, peer_id: str) -> bool:
    """Whether the stage of this peer recomputes in this plan."""
    workload = snapshot.workload
    stage = plan.stage_of(peer_id)
    if stage is None:
        return False
    record = next(record for record in snapshot.records if record.peer_id == peer_id)
    return stage_recomputes(workload, plan, stage, record.device)


def stage_recomputes(workload: Workload, plan: Plan, stage: Stage, device: Device) -> bool:
    """Whether a stage recomputes on this device."""
    memory = stage_memory(workload).of(device.kind, len(plan.pipelines))
    first, end = stage.first_layer, stage.end_layer
    return memory.recomputes(first, end, stage.in_flight, device.memory_bytes)


def stage_work_ns(snapshot: Snapshot, plan: Plan, peer_id: str, device: Device) -> int:
    """Time of a device for the microbatches of a step that this peer computes, by its timings,
    including the forwards that it runs again."""
    forwards = 2 if must_recompute(snapshot, plan, peer_id) else 1
    whole_ns = 0
    for number, position in plan.places_of(peer_id):
        pipeline = plan.pipelines[number]
        layers = pipeline.stages[position].layers
        timings = [timing_of(device, snapshot.workload, layer) for layer in layers]
        once_ns = sum(forwards * each.forward_ns + each.backward_ns for each in timings)
        whole_ns += pipeline.microbatch_count * once_ns
    return whole_ns


def problem_in_force(snapshot: Snapshot, plan: Plan) -> PlanningProblem:
    """The problem from which this plan was made. If one of its stages recomputes, planning took all
    stages to recompute. Stage-holders may be gone by now."""
    problem = problem_of(snapshot)
    here = {record.peer_id for record in snapshot.records}
    holders = (peer_id for peer_id in plan.stage_holders() if peer_id in here)
    if any(must_recompute(snapshot, plan, peer_id) for peer_id in holders):
        return recomputing(problem)
    return problem


def recomputing(problem: PlanningProblem) -> PlanningProblem:
    """The problem of a swarm in which all stages recompute."""
    devices, stages = problem.devices, problem.devices.stages
    once = stages.once_bytes
    return replace(
        problem,
        layers=stages.again,
        devices=replace(
            devices,
            layer_ns=tuple(map(_forward_again, devices.layer_ns)),
            memory_bytes=tuple(max(0, room - once) for room in devices.memory_bytes),
            aside_bytes=once,
            offered_bytes=devices.memory_bytes,
        ),
        step=replace(problem.step, splits_backwards=False),
    )


def _forward_again(times: LayerNs) -> LayerNs:
    if isinstance(times, UnlikeNs):
        backwards = map(int.__add__, times.forwards_ns, times.backwards_ns)
        return unlike_ns(times.forwards_ns, tuple(backwards))
    return replace(
        times,
        embedding_backward_ns=times.embedding_backward_ns + times.embedding_forward_ns,
        block_backward_ns=times.block_backward_ns + times.block_forward_ns,
        head_backward_ns=times.head_backward_ns + times.head_forward_ns,
    )
