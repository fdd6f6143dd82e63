"""What a daemon takes from its swarm: its `daemon.machine.world.World`."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from p2p_dtfm.core.planner.planner import compute_plan
from p2p_dtfm.core.protocol.canonical import encode
from p2p_dtfm.core.protocol.plan import NoPlan, Plan
from p2p_dtfm.core.protocol.records import Device
from p2p_dtfm.core.protocol.run_spec import RunSpec
from p2p_dtfm.core.protocol.snapshot import Snapshot
from p2p_dtfm.daemon.dashboard.dashboard_host import DashboardHost
from p2p_dtfm.daemon.dashboard.seen import Seen
from p2p_dtfm.daemon.machine.settings import Settings
from p2p_dtfm.daemon.machine.world import MakeStageRunner
from p2p_dtfm.daemon.node.daemon import Daemon
from p2p_dtfm.daemon.node.resident import Resident
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.directory.port import DirectoryPort
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.net.libp2p.port import HostPort
from p2p_dtfm.testbed.virtual.counted_runner import counted_runner
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.peer import Peer
from p2p_dtfm.testbed.virtual.wires.directory import VirtualDirectory
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork
from p2p_dtfm.train.stage.emulated import emulated_device

WITHIN, OUTSIDE = datetime(2026, 3, 2, 12), datetime(2026, 3, 2, 23)
"""Times of local clocks, within and outside the owner's hours. A clock stands still at one of them
until somebody puts it to the other."""


class Shared(Protocol):
    """What all daemons of a swarm have in common."""

    loop: VirtualLoop
    folder: Path
    network: VirtualNetwork
    plans: dict[bytes, Plan | NoPlan]
    taken: Counter[str]


class VirtualResident(Resident):
    """A resident whose daemons are those of one peer of the swarm."""

    def __init__(self, settings: Settings, peer: Peer, world: "WorldOf") -> None:
        super().__init__(settings, lambda: OUTSIDE if peer.is_outside_hours else WITHIN)
        self._peer = peer
        self._world = world

    def make_daemon(self, settings: Settings, dashboard: DashboardHost, seen: Seen) -> Daemon:
        self._peer.daemon = Daemon(settings, dashboard, seen, world=self._world)
        return self._peer.daemon


class WorldOf:
    """What the daemon of a peer takes from the swarm."""

    def __init__(self, swarm: Shared, peer: Peer) -> None:
        self._swarm = swarm
        self._peer = peer

    @property
    def lock_folder(self) -> Path:
        return self._swarm.folder

    def note_typed(self, home: Path, settings: Settings) -> None:
        """Does nothing: nobody types a command here, and could forget it."""

    async def start_host(
        self, identity: Path, listen: Sequence[str], announce: Sequence[str], maps_port: bool
    ) -> HostPort:
        assert self._peer.process is not None
        host = self._swarm.network.join(self._peer.process, Identity.load_or_create(identity))
        self._peer.host, host.is_dumb = host, self._peer.has_dumb_p2pd
        return host

    async def start_directory(
        self, host: HostPort, initial_peers: Sequence[str], serves: bool
    ) -> DirectoryPort:
        assert isinstance(host, VirtualHost)
        return VirtualDirectory(self._swarm.network, host)

    def direct_lines(
        self, host: HostPort, run_digest: str, listen: Sequence[str], control: ControlPlane
    ) -> None:
        """Does nothing: all bytes go over the links of this world."""

    def measure_device(
        self,
        spec: RunSpec,
        device: str,
        threads: int,
        memory_limit_bytes: int | None,
        progress: Callable[[int, int], None],
    ) -> Device:
        assert memory_limit_bytes is not None
        return emulated_device(spec, self._peer.flops_per_s, memory_limit_bytes)

    def stage_runner(self, device: Device, setting: str) -> MakeStageRunner:
        return partial(counted_runner, self._swarm.taken, self._peer.peer_id, device)

    def plan(self, snapshot: Snapshot) -> Plan | NoPlan:
        """Computes each snapshot's plan once for all daemons: equal snapshots have equal plans."""
        key, plans = encode(snapshot), self._swarm.plans
        if key not in plans:
            plans[key] = compute_plan(snapshot)
        return plans[key]

    def share_the_interpreter(self) -> None:
        """Does nothing: the interpreter is the world's."""

    def tasks(self) -> set[asyncio.Task[Any]]:
        mine = self._peer.process
        return {task for task in self._swarm.loop.tasks() if task.process is mine}
