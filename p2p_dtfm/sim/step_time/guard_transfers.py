"""Reduced gradients on their way to guardians, for which a lone pipeline's Prepared waits."""

from p2p_dtfm.core.cost_model.guarding import Guarded, guarded_of, waited_for
from p2p_dtfm.core.cost_model.tables.stage_memory import stage_memory
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.sim.scenario.scenario import Scenario


def guards_in_place(
    plan: Plan, scenario: Scenario, workload: Workload, step_ns: int
) -> tuple[Guarded, ...]:
    """The guarded layers of all members of the plan, by their numbers in the scenario's order. None
    where guardians lag: a step that takes `step_ns` without them would wait for them too long."""
    if len(plan.pipelines) > 1:
        return ()
    peers, numbers = scenario.peers, {peer.name: at for at, peer in enumerate(scenario.peers)}
    spares = [numbers[name] for name in sorted(plan.spares)]
    holders = [numbers[name] for name in sorted(plan.stage_holders())]
    room = {number: peers[number].memory_bytes for number in (*spares, *holders)}
    memory = stage_memory(workload)
    for stage in plan.pipelines[0].stages:
        number, first, end = numbers[stage.peer_id], stage.first_layer, stage.end_layer
        offered_bytes = peers[number].memory_bytes
        room[number] -= memory.used_bytes(first, end, stage.in_flight, offered_bytes)

    def way(holder: int, guardian: int) -> tuple[int, int]:
        one, other = peers[holder].name, peers[guardian].name
        latency_ns = scenario.link(one, other).latency_ns + scenario.link(other, one).latency_ns
        return scenario.transfer_bytes_per_s(one, other), latency_ns

    def may(guardian: int, layer: int) -> bool:
        return workload.may_have(peers[guardian].name, layer)

    held = {numbers[stage.peer_id]: list(stage.layers) for stage in plan.pipelines[0].stages}
    sizes = [FLOAT_BYTES * workload.cost(n).parameter_count for n in range(workload.layer_count)]
    return waited_for(guarded_of(held, [*spares, *holders], room, sizes, way, may), step_ns)
