"""Reduced gradients on their way to guardians, for which a lone pipeline's Prepared waits."""

from dataclasses import dataclass

from p2p_dtfm.core.cost_model.cuts import HELD_CUTS, STATE_PARTS, lags
from p2p_dtfm.core.cost_model.guardians import GUARDED_COPIES, LEAST_ROOM_BYTES, guarded_layers
from p2p_dtfm.core.cost_model.placement_problem import duration_ns
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import FLOAT_BYTES, Workload
from p2p_dtfm.core.virtual.virtual_network import VirtualNetwork
from p2p_dtfm.core.virtual.virtual_time import VirtualTime
from p2p_dtfm.sim.scenario.scenario import Scenario


@dataclass(frozen=True, slots=True)
class GuardTransfer:
    """What one holder sends; peers are numbers in the scenario's order."""

    holder: int
    guardian: int
    size_bytes: int
    back_ns: int
    """Latency of the receipt."""


def guards_in_place(
    plan: Plan, scenario: Scenario, workload: Workload, step_ns: int
) -> tuple[GuardTransfer, ...]:
    """Of all members of the plan; none where guardians lag, since steps that take so long without
    them would wait too long."""
    members = (*plan.stage_holders(), *plan.spares)
    if len(plan.pipelines) > 1 or len(members) < 2:
        return ()
    numbers = {peer.name: number for number, peer in enumerate(scenario.peers)}
    sizes = {
        layer: FLOAT_BYTES * workload.cost(layer).parameter_count
        for layer in range(workload.layer_count)
    }
    room = {name: _room_bytes(plan, scenario, workload, name) for name in members}

    def way(holder: str, guardian: str) -> tuple[int, int]:
        there, back = scenario.link(holder, guardian), scenario.link(guardian, holder)
        limits = (
            there.bytes_per_s,
            scenario.peer(holder).uplink_bytes_per_s,
            scenario.peer(guardian).downlink_bytes_per_s,
        )
        return min(filter(None, limits)), there.latency_ns + back.latency_ns

    guardians = guarded_layers(plan, room, lambda layer: GUARDED_COPIES * sizes[layer], way)
    sent: dict[tuple[str, str], int] = {}
    for stage in plan.pipelines[0].stages:
        for layer in stage.layers:
            if layer in guardians:
                ends = stage.peer_id, guardians[layer]
                sent[ends] = sent.get(ends, 0) + sizes[layer]
    waits_ns = []
    for ends, size in sent.items():
        rate, round_trip_ns = way(*ends)
        waits_ns.append(duration_ns(size, rate) + round_trip_ns)
    if _may_lag(plan, room, sizes, guardians) and lags(waits_ns, step_ns):
        return ()
    return tuple(
        GuardTransfer(
            numbers[holder], numbers[guardian], size, scenario.link(guardian, holder).latency_ns
        )
        for (holder, guardian), size in sent.items()
    )


def _may_lag(
    plan: Plan, room: dict[str, int], sizes: dict[int, int], guardians: dict[int, str]
) -> bool:
    """Whether each of several stage-holders has room for copies of its own layers."""
    left = dict(room)
    for layer, guardian in guardians.items():
        left[guardian] -= GUARDED_COPIES * sizes[layer]
    stages = plan.pipelines[0].stages
    return len(stages) == 1 or all(
        HELD_CUTS * STATE_PARTS * sum(sizes[layer] for layer in stage.layers) <= left[stage.peer_id]
        for stage in stages
    )


def _room_bytes(plan: Plan, scenario: Scenario, workload: Workload, name: str) -> int:
    """What its stage leaves of a peer's memory, and at least what everybody has."""
    stage, left = plan.stage_of(name), scenario.peer(name).memory_bytes
    for layer in stage.layers if stage is not None else ():
        cost = workload.cost(layer)
        left -= cost.state_bytes + (stage.in_flight if stage else 0) * cost.saved_bytes
    return max(LEAST_ROOM_BYTES, left)


class Guarding:
    """Sends them when a stage is done; in the end `received_ns` says when receipts were back."""

    def __init__(
        self, time: VirtualTime, network: VirtualNetwork, guards: tuple[GuardTransfer, ...]
    ) -> None:
        self._time = time
        self._network = network
        self._guards = guards
        self.received_ns: dict[int, int] = {}

    def send(self, holder: int) -> None:
        """The gradients of all layers of `holder` are whole."""
        for guard in self._guards:
            if guard.holder == holder:
                size, arrived = guard.size_bytes, self._arrived
                self._network.send(holder, guard.guardian, size, arrived, guard)

    def _arrived(self, guard: GuardTransfer) -> None:
        back_ns = self._time.now_ns + guard.back_ns
        self.received_ns[guard.holder] = max(self.received_ns.get(guard.holder, 0), back_ns)
