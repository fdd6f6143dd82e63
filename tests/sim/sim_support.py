"""Scenarios, run specs and worlds for the simulator's tests."""

from collections.abc import Sequence

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.run_spec import RunSpec, parse_run_spec
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.scenario.scenario import Scenario, parse_scenario

EQUAL_PEERS = """
name = "equal"

[workload]
head = false

[[group]]
name = "home"
count = {count}
forward_tflops = 1.0
{limits}

[[link]]
from = "*"
to = "*"
latency_ms = {latency_ms}
bandwidth_mbps = {bandwidth_mbps}
"""


def equal_peers(
    count: int, latency_ms: float = 10.0, bandwidth_mbps: float = 800.0, limits: str = ""
) -> Scenario:
    """Peers that are all alike, with the same link between any two of them."""
    text = EQUAL_PEERS.format(
        count=count, latency_ms=latency_ms, bandwidth_mbps=bandwidth_mbps, limits=limits
    )
    return parse_scenario(text, "equal.toml")


def small_spec(layers: int = 4, global_batch: int = 16, width: int = 256) -> RunSpec:
    return parse_run_spec(
        {
            "name": "small",
            "total_steps": 10,
            "model": {
                "layers": layers,
                "width": width,
                "heads": 4,
                "context": 128,
                "vocabulary": 256,
            },
            "batch": {"global_batch": global_batch, "microbatch": 1},
            "optimizer": {"peak_learning_rate": 1e-3},
        },
        "small.toml",
    )


def found_together(world: AgreementWorld, names: Sequence[str]) -> None:
    """The first peer founds a run after three seconds, and all others ask it to let them in."""
    for name in names:
        world.add_peer(name)
        world.peers[name].agreement.wants_view()
    world.after(3 * SECOND_NS, lambda: world.found(names[0]))
    for name in names[1:]:
        world.ask_to_join(name, names[0])
