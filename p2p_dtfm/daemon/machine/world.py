"""What a daemon takes from the world that it runs in, besides the time and its event loop.

The loop is a port already: jobs in threads, timers, signals and sockets are asked of it. `Machine`
is the world of whoever runs `p2p-dtfm`; swarms in virtual time bring their own.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from p2p_dtfm.core.planner.planner import compute_plan, without_planning
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.machine.locks import temporary_folder
from p2p_dtfm.daemon.machine.owner.allowed import note_typed
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.net.direct.lines import DirectLines
from p2p_dtfm.net.directory.directory import Directory
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.host import Host
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.net.streams.wire import LinesPort
from p2p_dtfm.train.stage.device.recorded_runner import runner_on
from p2p_dtfm.train.stage.emulated import EmulatedStageRunner, emulated_flops_per_s
from p2p_dtfm.train.stage.measure import measure_device, select_device
from p2p_dtfm.train.stage.stage_runner import StageRunner

SWITCH_INTERVAL_S = 0.0005
MakeStageRunner = Callable[..., StageRunner]

log = logging.getLogger("p2p_dtfm")


class World(Protocol):
    """What a daemon takes from its world: hosts, the directory and devices."""

    @property
    def lock_folder(self) -> Path:
        """Where daemons of one world see to it that no two speak as one peer."""
        ...

    def note_typed(self, home: Path, settings: Settings) -> None:
        """Write down what was typed, for the user who starts the daemon next time."""
        ...

    async def start_host(
        self, identity: Path, listen: Sequence[str], announce: Sequence[str], maps_port: bool
    ) -> HostPort:
        """Start this peer's host. Raises `UserError`."""
        ...

    async def start_directory(
        self, host: HostPort, initial_peers: Sequence[str], serves: bool
    ) -> DirectoryPort:
        """Start the directory. Raises `UserError`."""
        ...

    def direct_lines(
        self, host: HostPort, run_digest: str, listen: Sequence[str], control: ControlPlane
    ) -> LinesPort | None:
        """Connections beside libp2p's, for what is large and for what is often asked through
        `control`. None where there are none."""
        ...

    def measure_device(
        self,
        spec: RunSpec,
        device: str,
        threads: int,
        memory_limit_bytes: int | None,
        progress: Callable[[int, int], None],
    ) -> Device:
        """Time the layers on a device. Called in a thread. Raises `UserError`."""
        ...

    def stage_runner(self, device: Device, setting: str) -> MakeStageRunner:
        """What runs a stage on a device that was measured; `setting` is what the user called it."""
        ...

    def plan(self, snapshot: Snapshot) -> Plan | NoPlan:
        """The plan of a snapshot, as `core.planner.planner.compute_plan` makes it. Called in a
        thread."""
        ...

    def share_the_interpreter(self) -> None:
        """Called once all is loaded."""
        ...

    def tasks(self) -> set[asyncio.Task[Any]]:
        """Tasks of the daemon that asks."""
        ...


class Machine:
    """The world of this machine."""

    @property
    def lock_folder(self) -> Path:
        return temporary_folder()

    def note_typed(self, home: Path, settings: Settings) -> None:
        note_typed(home, settings)

    async def start_host(
        self, identity: Path, listen: Sequence[str], announce: Sequence[str], maps_port: bool
    ) -> HostPort:
        return await Host.start(identity, listen, announce, maps_port=maps_port)

    async def start_directory(
        self, host: HostPort, initial_peers: Sequence[str], serves: bool
    ) -> DirectoryPort:
        assert isinstance(host, Host), "the DHT is a part of libp2p's host"
        return await Directory.start(host, initial_peers, serves)

    def direct_lines(
        self, host: HostPort, run_digest: str, listen: Sequence[str], control: ControlPlane
    ) -> LinesPort | None:
        lines = DirectLines(host, run_digest, listen)
        lines.carry_calls(control)
        return lines

    def measure_device(
        self,
        spec: RunSpec,
        device: str,
        threads: int,
        memory_limit_bytes: int | None,
        progress: Callable[[int, int], None],
    ) -> Device:
        emulated = emulated_flops_per_s(device)
        torch_device = select_device(device)
        return measure_device(spec, torch_device, threads, memory_limit_bytes, emulated, progress)

    def stage_runner(self, device: Device, setting: str) -> MakeStageRunner:
        if emulated_flops_per_s(setting) is None:
            return runner_on(device.kind)
        return partial(EmulatedStageRunner, device)

    def plan(self, snapshot: Snapshot) -> Plan | NoPlan:
        try:
            return compute_plan(snapshot)
        except Exception:  # else what one member states would end all daemons at once
            log.exception("bug while planning: the plan in force stays, if it can")
            return without_planning(snapshot)

    def share_the_interpreter(self) -> None:
        """Make the event loop and the compute thread hold each other up as little as they can.

        Some 200,000 objects that imports have left stay for good. Each full collection that looks
        through them holds up both for 0.1 to 0.3 s. A thread that wants the interpreter gets it
        after this interval, by default 5 ms, from one that does not let go.
        """
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(SWITCH_INTERVAL_S)

    def tasks(self) -> set[asyncio.Task[Any]]:
        return asyncio.all_tasks()
