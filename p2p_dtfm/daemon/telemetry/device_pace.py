"""How fast this device works while it trains, beside whatever else the machine does."""

from collections import deque
from statistics import median

import msgspec

from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.measured_plans import STEPS_ENOUGH
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Device, LayerTiming
from p2p_dtfm.core.recovery.view import View

NOTABLE_PERCENT = 20
SLOWEST_FACTOR = 32


class DevicePace:
    """`committed` with each step, and the time that the compute thread was busy in all."""

    def __init__(self) -> None:
        self._steps_ns: deque[int] = deque(maxlen=STEPS_ENOUGH)
        self._busy_ns: int | None = None

    def took_over(self) -> None:
        self._steps_ns.clear()
        self._busy_ns = None

    def committed(self, busy_ns: int) -> None:
        if self._busy_ns is not None:
            self._steps_ns.append(busy_ns - self._busy_ns)
        self._busy_ns = busy_ns

    def seen(self, device: Device, view: View, me: str) -> Device | None:
        """The device as its steps show it, if that is notably slower than `device` says."""
        plan = view.plan
        place = plan.place_of(me) if isinstance(plan, Plan) else None
        if not isinstance(plan, Plan) or place is None or len(self._steps_ns) < STEPS_ENOUGH:
            return None
        workload = view.snapshot.workload
        timings = [timing_of(device, workload, layer) for layer in plan.layers_of(me)]
        count = plan.pipelines[place[0]].microbatch_count
        said_ns = count * sum(timing.forward_ns + timing.backward_ns for timing in timings)
        seen_ns = int(median(self._steps_ns))
        if said_ns == 0 or seen_ns * 100 <= (100 + NOTABLE_PERCENT) * said_ns:
            return None
        seen_ns = min(seen_ns, SLOWEST_FACTOR * said_ns)

        def slower(timing: LayerTiming) -> LayerTiming:
            forward_ns, backward_ns = timing.forward_ns, timing.backward_ns
            return LayerTiming(forward_ns * seen_ns // said_ns, backward_ns * seen_ns // said_ns)

        return msgspec.structs.replace(
            device,
            listed=tuple(map(slower, device.unlike)) or msgspec.UNSET,
            embedding=slower(device.embedding),
            block=slower(device.block),
            head=slower(device.head),
        )
