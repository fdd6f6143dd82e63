"""How long a device takes for a layer, by its record."""

from p2p_dtfm.core.protocol.records import Device, LayerTiming
from p2p_dtfm.core.protocol.workload import LayerRole, Workload


def timing_of(device: Device, workload: Workload, layer: int) -> LayerTiming:
    """Of one microbatch. A record that does not time unlike layers one by one, as it should, counts
    by what it says of those between the ends together."""
    unlike = workload.unlike
    if unlike is not None and len(device.unlike) == len(unlike.costs):
        return device.unlike[unlike.order[layer]]
    kinds = {LayerRole.EMBEDDING: device.embedding, LayerRole.HEAD: device.head}
    return kinds.get(workload.kind(layer), device.block)


def timings_of(device: Device, workload: Workload) -> tuple[LayerTiming, ...]:
    """Of one layer of each kind that the run has, and of nothing else that a record may say."""
    unlike = workload.unlike
    if unlike is None:
        return device.embedding, device.block, device.head
    layers = map(unlike.order.index, range(len(unlike.costs)))
    return tuple(timing_of(device, workload, layer) for layer in layers)
