"""A node that anybody can call, and that trains nothing. A swarm whose founder is behind a router
has it in the place of `p2p-dtfm bootstrap`; its parts are those of
`daemon.peers.bootstrap_node`."""

import asyncio
import random

from p2p_dtfm.daemon.peers.bootstrap_node import _refuse
from p2p_dtfm.daemon.peers.gate import GateKeeper
from p2p_dtfm.daemon.peers.reachability import ReachabilityService
from p2p_dtfm.net.contacts.identity import Identity
from p2p_dtfm.net.libp2p.control import ControlPlane
from p2p_dtfm.testbed.virtual.loop import VirtualLoop
from p2p_dtfm.testbed.virtual.process import Process
from p2p_dtfm.testbed.virtual.turns import VirtualTask
from p2p_dtfm.testbed.virtual.wires.host import VirtualHost
from p2p_dtfm.testbed.virtual.wires.network import VirtualNetwork

NAME = "meeting point"


class MeetingPoint:
    """A meeting point, which may die and come back at the same address."""

    def __init__(self, network: VirtualNetwork, loop: VirtualLoop, identity: Identity) -> None:
        self.peer_id = identity.peer_id
        self.address = f"{network.address_of(self.peer_id)}/p2p/{self.peer_id}"
        self._network = network
        self._loop = loop
        self._identity = identity
        self._lives = 0
        self._process: Process | None = None
        self._host: VirtualHost | None = None
        self._life: asyncio.Task[None] | None = None
        """Kept: what it waits for nobody else knows, so it would be collected while it waits."""
        self._graves: list[VirtualTask] = []

    @property
    def is_there(self) -> bool:
        return self._process is not None and not self._process.is_dead

    def start(self) -> None:
        draws = random.Random(f"{self.peer_id} {self._lives}")
        self._process = Process(f"{NAME}.{self._lives}", self._loop, draws)
        self._lives += 1
        self._host = self._network.join(self._process, self._identity)
        self._life = self._process.begin(_live(self._host))

    def kill(self) -> None:
        assert self._process is not None and self._host is not None
        self._graves += [it for it in self._loop.tasks() if it.process is self._process]
        self._process.kill()
        self._network.leave(self._host)


async def _live(host: VirtualHost) -> None:
    GateKeeper.of(host)
    await ControlPlane(host, _refuse).ready()
    await ReachabilityService(host).ready()
    await asyncio.get_running_loop().create_future()  # until it is killed
