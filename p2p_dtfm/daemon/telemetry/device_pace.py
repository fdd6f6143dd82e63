"""How fast this device works while it trains, beside whatever else the machine does."""

from collections import deque
from collections.abc import Iterable
from statistics import median

from p2p_dtfm.core.audit.believed_speeds import pace_of, scaled
from p2p_dtfm.core.planner.recomputation import stage_work_ns
from p2p_dtfm.core.protocol.layers.timings import timing_of
from p2p_dtfm.core.protocol.measured_plans import STEPS_ENOUGH
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.workload import LayerRole, Workload
from p2p_dtfm.core.recovery.view import View

NOTABLE_PERCENT = 20
SLOWEST_FACTOR = 32


class DevicePace:
    """Call `committed` with each step, and with the time that the compute thread was busy in
    all."""

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

    def seen(self, measured: Device, stated: Device, view: View, me: str) -> Device | None:
        """The device as its steps show it, if that differs notably from `stated`, as its record
        says. It may be slower than when it was `measured`, or as fast again."""
        if (seen_ns := self._seen_ns(view, me)) is None:
            return None
        plan, workload = view.plan, view.snapshot.workload
        assert isinstance(plan, Plan)
        once_ns = stage_work_ns(view.snapshot, plan, me, measured)
        once_ns += _updates_ns(workload, plan.layers_of(me), measured)
        if once_ns == 0:
            return None
        found = measured
        if seen_ns * 100 > (100 + NOTABLE_PERCENT) * once_ns:
            found = scaled(measured, min(seen_ns, SLOWEST_FACTOR * once_ns), once_ns)
        paces_ns = (pace_of(device, workload) for device in (found, stated))
        slower, faster = sorted(paces_ns, reverse=True)
        return found if slower * 100 > (100 + NOTABLE_PERCENT) * faster else None

    def _seen_ns(self, view: View, me: str) -> int | None:
        """How long the compute thread is busy with a step; None before enough were seen."""
        plan = view.plan
        has_stage = isinstance(plan, Plan) and plan.place_of(me) is not None
        if not has_stage or len(self._steps_ns) < STEPS_ENOUGH:
            return None
        return int(median(self._steps_ns))


def _updates_ns(workload: Workload, layers: Iterable[int], device: Device) -> int:
    """How long updates of blocks take in a step, where they are counted: the compute thread makes
    them, too."""
    blocks = (n for n in layers if workload.kind(n) is LayerRole.BLOCK)
    forward_ns = sum(timing_of(device, workload, layer).forward_ns for layer in blocks)
    once_ns = forward_ns * workload.block_update_ppm // 1_000_000
    return max(1, workload.inner_steps) * once_ns
