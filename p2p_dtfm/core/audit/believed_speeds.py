"""How fast each peer is taken to be: the slower of its own word and of what others have measured.

The other stage-holders of the plan in force may say so, since they have seen the peer work. Where
one peer has all stages, the members without one may. In a run with audits new members have no say:
keys cost nothing.
"""

import msgspec

from p2p_dtfm.core.audit.roles import watched
from p2p_dtfm.core.protocol.facts.seen_paces import middle_of
from p2p_dtfm.core.protocol.layers.timings import timings_of
from p2p_dtfm.core.protocol.measured_plans import names_in
from p2p_dtfm.core.protocol.records import LAYER_LIMIT_NS, Device, LayerTiming, PeerRecord
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.core.protocol.workload import Workload

LONGEST_NS = LAYER_LIMIT_NS - 1


def pace_of(device: Device, workload: Workload) -> int:
    """One microbatch there and back through one layer of each kind, by the device's record. Kinds
    that the run does not have are left out: they would only hide how fast the device claims to be.
    """
    return sum(map(there_and_back_ns, timings_of(device, workload)))


def there_and_back_ns(timing: LayerTiming) -> int:
    """For one microbatch. What takes no measurable time counts as 1 ns, as in the plan."""
    return max(1, timing.forward_ns) + max(1, timing.backward_ns)


def slower(timing: LayerTiming, numerator: int, denominator: int) -> LayerTiming:
    """`numerator / denominator` times as slow, also where it is said to take no time."""
    return LayerTiming(
        min(LONGEST_NS, max(1, timing.forward_ns) * numerator // denominator),
        min(LONGEST_NS, max(1, timing.backward_ns) * numerator // denominator),
    )


def scaled(device: Device, numerator: int, denominator: int) -> Device:
    """The device, `numerator / denominator` times as slow."""

    def each(timing: LayerTiming) -> LayerTiming:
        return slower(timing, numerator, denominator)

    return msgspec.structs.replace(
        device,
        embedding=each(device.embedding),
        block=each(device.block),
        head=each(device.head),
        listed=tuple(map(each, device.unlike)) or msgspec.UNSET,
    )


def seen_slower(snapshot: Snapshot) -> dict[str, int]:
    """The pace of each peer whom the others have seen to be slower than its own record says."""
    if snapshot.present is None or not any(record.paces for record in snapshot.records):
        return {}
    holders = snapshot.present.stage_holders()
    new = watched(snapshot.bars, snapshot.step)
    voices = [
        record
        for record in snapshot.records
        if (record.peer_id in holders or len(holders) == 1) and record.peer_id not in new
    ]
    found = {}
    for record in snapshot.records:
        me = record.peer_id
        pace_ns = middle_of([it.paces.get(me, 0) for it in voices if it.peer_id != me])
        if pace_ns > pace_of(record.device, snapshot.workload):
            found[me] = pace_ns
    return found


def believed(snapshot: Snapshot) -> Snapshot:
    """The snapshot with each peer as slow as the others have seen it. It loses what steps took
    under plans in which such a peer had a stage: its false word decided how work was dealt there.
    """
    slow = seen_slower(snapshot)
    if not slow:
        return snapshot
    return msgspec.structs.replace(
        snapshot,
        records=tuple(_believed(it, slow, snapshot.workload) for it in snapshot.records),
    )


def _believed(record: PeerRecord, slow: dict[str, int], workload: Workload) -> PeerRecord:
    device, pace_ns = record.device, slow.get(record.peer_id)
    if pace_ns is not None:
        device = scaled(device, pace_ns, pace_of(device, workload))
    measured = tuple(it for it in record.measured if names_in(it.shape).isdisjoint(slow))
    return msgspec.structs.replace(record, device=device, measured=measured)
