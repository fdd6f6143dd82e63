"""What a simulated peer sees of its world."""

import random
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from p2p_dtfm.core.consensus.actions import AgreementTiming
from p2p_dtfm.core.liveness.liveness import LivenessTiming
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.snapshot import Snapshot, ViewId
from p2p_dtfm.core.protocol.workload import Workload
from p2p_dtfm.core.recovery.partial_replay import PartialReplay
from p2p_dtfm.sim.faults.invariants import Invariants


class SimulatedWorld(Protocol):
    """Time, chance, the network, and how long things take."""

    chance: random.Random
    compute_ns: tuple[int, int]
    familiar: dict[str, tuple[str, ...]]
    invariants: Invariants
    liars: Any
    liveness_timing: LivenessTiming
    now_ns: int
    plan_ns: int
    planner: Callable[[Snapshot], Plan | NoPlan]
    redone: dict[ViewId, PartialReplay]
    rejoins: bool
    tick_ns: int
    timing: AgreementTiming
    transfer_ns: int
    workload: Workload

    @property
    def peers(self) -> Mapping[str, Any]: ...

    def after(self, delay_ns: int, event: Callable[[], None]) -> None: ...

    def committed(self, name: str, step: int) -> None: ...

    def send(self, sender: str, receiver: str, message: Any) -> None: ...

    def tell(self, name: str, text: str) -> None: ...
