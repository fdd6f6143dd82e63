"""What all daemons of a swarm with liars say of their machines, and how long paced ones take."""

from p2p_dtfm.core.protocol.records import Device, LayerTiming
from p2p_dtfm.core.protocol.run_spec import RunSpec

BLOCK, END = LayerTiming(20_000_000, 40_000_000), LayerTiming(500_000, 1_000_000)
PACED_BLOCK = LayerTiming(60_000_000, 120_000_000)
"""A paced daemon takes as long as it says: so long that a step's other costs count little."""


def equal_device(memory_bytes: int, is_paced: bool = False, kind: str = "cpu") -> Device:
    return Device(kind, "equal", memory_bytes, END, PACED_BLOCK if is_paced else BLOCK, END)


def fair_step_s(spec: RunSpec, peers: int) -> float:
    """How long a step takes if all peers compute as many microbatches, in the time that they
    say."""
    from p2p_dtfm.train.stage.emulated import timings_of  # torch, which no command waits for

    timings = timings_of(equal_device(0, is_paced=True), spec, range(spec.model.layers + 2))
    once_ns = sum(each.forward_ns + each.backward_ns for each in timings.values())
    return -(-spec.microbatches_per_step // peers) * once_ns / 1e9
