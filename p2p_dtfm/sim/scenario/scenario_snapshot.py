"""What the planner plans from, made of a scenario: a workload, and a record of each peer."""

import msgspec

from p2p_dtfm.core.protocol.errors import UserError
from p2p_dtfm.core.protocol.records import (
    PROTOCOL_VERSION,
    Device,
    Intent,
    LayerTiming,
    Link,
    PeerRecord,
    Reachability,
)
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot, founding_snapshot
from p2p_dtfm.core.protocol.workload import (
    FLOAT_BYTES,
    KIBI,
    LayerCost,
    Workload,
    reduced_bytes_per_kibi,
    workload_of,
)
from p2p_dtfm.sim.scenario.execution import (
    CODEC_BITS_PER_VALUE,
    OURS,
    Execution,
    wire_bytes,
)
from p2p_dtfm.sim.scenario.scenario import Scenario, ScenarioPeer

LONGEST_NS = 1 << 62
"""A hundred and forty-six years: longer times of layers would have no canonical bytes in a plan."""


def workload_in(scenario: Scenario, spec: RunSpec, execution: Execution) -> Workload:
    """The run's workload as these peers do it: a daemon's, except for what the execution says.

    The execution may say that all stages recompute. A layer then keeps only its input for each
    microbatch in flight. Where the scenario or the execution has no language-model head, the last
    layer is a norm and a narrow projection, as in the paper's runs.
    """
    if spec.privacy.ends:
        named = spec.privacy.with_founder(scenario.founder)
        spec = spec.model_copy(update={"privacy": named})
    workload = workload_of(spec)
    if execution.recompute is not None:
        how = "never" if execution.splits else "included"
        workload = msgspec.structs.replace(workload, recompute=how)
    if execution.order != "1f1b":  # GPipe's runs take one step with the gradients of all
        workload = msgspec.structs.replace(workload, inner_steps=0)
    if execution.gradient_codec is not None and execution.is_of_reductions:
        per_kibi = reduced_bytes_per_kibi(spec.codecs, execution.gradient_codec)
        workload = msgspec.structs.replace(workload, gradient_bytes_per_kibi=per_kibi)
    if workload.unlike is not None:  # unlike layers have one execution, the daemons'
        return workload
    tokens = spec.batch.microbatch * spec.model.context
    if not (scenario.head and execution.language_model_head):
        narrow = LayerCost(
            parameter_count=2 * spec.model.width,
            state_bytes=4 * FLOAT_BYTES * 2 * spec.model.width,
            saved_bytes=workload.boundary_bytes,
            forward_flops=tokens * spec.model.width,
        )
        workload = msgspec.structs.replace(workload, head=narrow)
    if execution.recompute:
        block = msgspec.structs.replace(workload.block, saved_bytes=workload.boundary_bytes)
        workload = msgspec.structs.replace(workload, block=block)
    return workload


def on_the_wire(workload: Workload, execution: Execution) -> Workload:
    """The workload with tensors counted as the execution's codecs send them, or as the run spec
    says where it states none.

    Counted in units of fp32 values. The planner takes 4 bytes for each parameter that is reduced,
    so with fp16 gradients it sees half as many parameters. Memory (`state_bytes`) stays as it is.
    """

    if execution.activation_codec is not None:
        workload = msgspec.structs.replace(
            workload,
            boundary_bytes=activation_bytes(workload, execution),
            boundary_bytes_per_kibi=FLOAT_BYTES * KIBI,
        )
    codec = execution.gradient_codec
    if codec is None or execution.is_of_reductions:
        return workload

    def coded(cost: LayerCost) -> LayerCost:
        size = wire_bytes(cost.parameter_count, codec)
        return msgspec.structs.replace(cost, parameter_count=-(-size // FLOAT_BYTES))

    return msgspec.structs.replace(
        workload,
        embedding=coded(workload.embedding),
        block=coded(workload.block),
        head=coded(workload.head),
        gradient_bytes_per_kibi=FLOAT_BYTES * KIBI,
        guarded_bytes_per_kibi=FLOAT_BYTES * KIBI * 32 // CODEC_BITS_PER_VALUE[codec],
    )


def activation_bytes(workload: Workload, execution: Execution) -> int:
    """Bytes on the wire of an activation, or of its gradient, between two stages."""
    if execution.activation_codec is None:
        return workload.boundary_wire_bytes
    return wire_bytes(workload.boundary_bytes // FLOAT_BYTES, execution.activation_codec)


def reduced_bytes(workload: Workload, layers: range, execution: Execution) -> int:
    """Bytes on the wire of these layers' gradients, or differences, from one holder."""
    costs = [workload.cost(layer) for layer in layers]
    if execution.gradient_codec is None or execution.is_of_reductions:
        return sum(map(workload.gradient_wire_bytes, costs))
    return wire_bytes(sum(cost.parameter_count for cost in costs), execution.gradient_codec)


def scenario_snapshot(scenario: Scenario, spec: RunSpec, execution: Execution = OURS) -> Snapshot:
    """The snapshot to plan from: what peers of this scenario would publish of themselves. Raises
    `UserError` for a peer so slow that its times have no canonical bytes."""
    workload = workload_in(scenario, spec, execution)
    digest = spec.digest()
    names = [peer.name for peer in scenario.peers]
    records = [
        PeerRecord(
            peer_id=peer.name,
            life=1,
            sequence=1,
            protocol_version=PROTOCOL_VERSION,
            run_digest=digest,
            device=device_of(peer, workload, execution),
            uplink_bytes_per_s=peer.uplink_bytes_per_s,
            downlink_bytes_per_s=peer.downlink_bytes_per_s,
            links={name: _link(scenario, peer.name, name) for name in names if name != peer.name},
            addresses=(),
            reachability=Reachability.DIRECT,
            intent=Intent.TRAIN,
        )
        for peer in scenario.peers
    ]
    for record in records:
        _require_possible(record.device)
    return founding_snapshot(digest, on_the_wire(workload, execution), records)


def _require_possible(device: Device) -> None:
    timings = (device.embedding, device.block, device.head, *device.unlike)
    if any(max(each.forward_ns, each.backward_ns) >= LONGEST_NS for each in timings):
        raise UserError(
            f"a peer of group {device.name!r} would take lifetimes for one layer of one microbatch",
            "give the group a higher forward_tflops, or the run a smaller batch.microbatch",
        )


def flops_of(peer: ScenarioPeer) -> int:
    """Operations per second of a peer. Raises `UserError` if nothing states them."""
    if not peer.forward_flops:
        raise UserError(
            f"group {peer.group!r} says measured = true, but no speed was measured here",
            f"give group {peer.group!r} a forward_tflops in place of measured = true, or play the "
            "scenario with real daemons: `p2p-dtfm demo --scenario NAME`",
        )
    return peer.forward_flops


def _layer_timing(cost: LayerCost, flops_per_s: int, execution: Execution) -> LayerTiming:
    """Time of a layer for one microbatch at a sustained rate."""
    forward_ns = max(1, -(-cost.forward_flops * 1_000_000_000 // flops_per_s))
    backward_ns = execution.backward_forwards * forward_ns
    if cost.backward_flops:
        again = execution.backward_forwards - 2  # forwards
        flops = cost.backward_flops + again * cost.forward_flops
        backward_ns = max(1, -(-flops * 1_000_000_000 // flops_per_s))
    return LayerTiming(forward_ns, backward_ns)


def device_of(peer: ScenarioPeer, workload: Workload, execution: Execution) -> Device:
    """What a peer would publish of its device. Raises `UserError` as `flops_of` does."""
    flops, unlike = flops_of(peer), workload.unlike
    return Device(
        kind="scenario",
        name=peer.group,
        memory_bytes=peer.memory_bytes,
        embedding=_layer_timing(workload.embedding, flops, execution),
        block=_layer_timing(workload.block, flops, execution),
        head=_layer_timing(workload.head, flops, execution),
        listed=tuple(
            _layer_timing(cost, flops, execution) for cost in (unlike.costs if unlike else ())
        )
        or msgspec.UNSET,
    )


def _link(scenario: Scenario, origin: str, to: str) -> Link:
    there, back = scenario.link(origin, to), scenario.link(to, origin)
    return Link(there.latency_ns + back.latency_ns, there.bytes_per_s)
