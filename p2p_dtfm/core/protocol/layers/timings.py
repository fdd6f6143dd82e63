"""How long a device takes for a layer, by its record."""

from p2p_dtfm.core.protocol.records import Device, LayerTiming
from p2p_dtfm.core.protocol.workload import LayerRole, Workload


def timing_of(device: Device, workload: Workload, layer: int) -> LayerTiming:
    """The layer's times for one microbatch. A record should time unlike layers one by one. If it
    does not, its times for the kinds of a GPT's layers count."""
    unlike = workload.unlike
    if unlike is not None and len(device.unlike) == len(unlike.costs):
        return device.unlike[unlike.order[layer]]
    kinds = {LayerRole.EMBEDDING: device.embedding, LayerRole.HEAD: device.head}
    return kinds.get(workload.kind(layer), device.block)


def timings_of(device: Device, workload: Workload) -> tuple[LayerTiming, ...]:
    """The times of one layer of each kind that the run has, and of nothing else in the record."""
    unlike = workload.unlike
    if unlike is None:
        return device.embedding, device.block, device.head
    layers = map(unlike.order.index, range(len(unlike.costs)))
    return tuple(timing_of(device, workload, layer) for layer in layers)
