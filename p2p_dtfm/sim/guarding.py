"""Reduced gradients on their way to guardians, for which a lone pipeline's Prepared waits."""

from dataclasses import dataclass

from p2p_dtfm.core.guardians import guarded_layers, keeps_up, room_bytes
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.core.virtual_network import SECOND_NS, VirtualNetwork
from p2p_dtfm.core.virtual_time import VirtualTime
from p2p_dtfm.core.workload import FLOAT_BYTES, STATE_COPIES, Workload
from p2p_dtfm.sim.execution import STREAM_OVERHEAD_NS
from p2p_dtfm.sim.scenario import Scenario


@dataclass(frozen=True, slots=True)
class Guard:
    """What one holder sends; peers are numbers in the scenario's order."""

    holder: int
    guardian: int
    size_bytes: int
    back_ns: int
    """Latency of the receipt."""


def guards_in_place(
    plan: Plan, scenario: Scenario, workload: Workload, step_ns: int
) -> tuple[Guard, ...]:
    """Of all members of the plan; those that keep up with steps that take so long without them."""
    members = (*plan.stage_holders(), *plan.spares)
    if len(plan.pipelines) > 1 or len(members) < 2:
        return ()
    memory = {name: scenario.peer(name).memory_bytes for name in members}
    sizes = {
        layer: FLOAT_BYTES * workload.cost(layer).parameter_count
        for layer in range(workload.layer_count)
    }
    needs = {layer: STATE_COPIES * size for layer, size in sizes.items()}
    guardians = guarded_layers(plan, members, needs, room_bytes(workload, plan, memory))
    numbers = {peer.name: number for number, peer in enumerate(scenario.peers)}
    guards = []
    for stage in plan.pipelines[0].stages:
        guardian = guardians.get(stage.first_layer)
        if guardian is None:
            continue
        size = sum(map(sizes.__getitem__, stage.layers))
        there = scenario.link(stage.peer_id, guardian)
        limits = (
            scenario.peer(stage.peer_id).uplink_bytes_per_s,
            scenario.peer(guardian).downlink_bytes_per_s,
        )
        rate = min([there.bytes_per_s, *(limit for limit in limits if limit)])
        if keeps_up(size, STREAM_OVERHEAD_NS - (-size * SECOND_NS // rate), step_ns):
            back_ns = scenario.link(guardian, stage.peer_id).latency_ns
            guards.append(Guard(numbers[stage.peer_id], numbers[guardian], size, back_ns))
    return tuple(guards)


class Guarding:
    """Sends them when a stage is done; in the end `received_ns` says when receipts were back."""

    def __init__(
        self, time: VirtualTime, network: VirtualNetwork, guards: tuple[Guard, ...]
    ) -> None:
        self._time = time
        self._network = network
        self._guards = {guard.holder: guard for guard in guards}
        self.received_ns: dict[int, int] = {}

    def send(self, holder: int) -> None:
        """The gradients of all layers of `holder` are whole."""
        guard = self._guards.get(holder)
        if guard is not None:
            size, arrived = guard.size_bytes, self._arrived
            self._network.send(holder, guard.guardian, size, arrived, guard)

    def _arrived(self, guard: Guard) -> None:
        self.received_ns[guard.holder] = self._time.now_ns + guard.back_ns
