"""All of a swarm ends at once, and its peers come back in any order, one after another, as daemons
do: each looks for the others, and goes on alone if nobody is there and its disk has all layers."""

import itertools
import random

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.drawn_plans import any_plan
from p2p_dtfm.sim.faults.lossy_network import LossyNetwork
from tests.core.builders import record

COST = LayerCost(1, 1, 1, 1)
SEEDS = 16
LOOKS_S = 6
"""For so long a daemon looks for members before it goes on alone."""
TOGETHER_WITHIN_S = 60
FOUNDER = "p0"


class PowerCut:
    """`apart`: for a while after they come back two halves do not see each other."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"p{number}" for number in range(self.chance.randint(2, 5))]
        workload = Workload(2, 8, 0, 1, COST, COST, COST, self.chance.choice((1, 1, 2)))
        network = LossyNetwork(
            delay_ns=(1_000_000, 60_000_000), loss=self.chance.choice((0.0, 0.01))
        )
        self.world = AgreementWorld(seed, workload, record("template"), any_plan, network, TIMING)
        self.world.rejoins = True
        for name in self.names:
            self.world.add_peer(name).agreement.wants_view()
        self.world.after(3 * SECOND_NS, lambda: self.world.found(FOUNDER))

    def train_for(self, seconds: int) -> None:
        self.world.run_to(self.world.now_ns + seconds * SECOND_NS)

    def strike(self, apart: bool) -> None:
        """They are back one after another; returns when the last one is, and all see each other."""
        world, chance = self.world, self.chance
        for name in chance.sample(self.names, len(self.names)):
            world.crash(name, lose_disk=False)
        heal = world.cut(self._halves() if apart else (), "halves")
        world.tell("world", "POWER CUT")
        at_s = chance.randint(1, 5)
        for name in chance.sample(self.names, len(self.names)):
            world.after(at_s * SECOND_NS, lambda name=name: self._comes_back(name))  # type: ignore[misc]
            at_s += chance.choice((0, 1, 3, 7, 15))
        self.train_for(at_s + 1 + (chance.choice((5, 60)) if apart else 0))
        heal()

    def _halves(self) -> set[tuple[str, str]]:
        half = set(self.chance.sample(self.names, len(self.names) // 2))
        pairs = itertools.permutations(self.names, 2)
        return {(one, other) for one, other in pairs if (one in half) != (other in half)}

    def _comes_back(self, name: str) -> None:
        self.world.restart(name)
        process = self.world.peers[name].process
        self.world.after(LOOKS_S * SECOND_NS, lambda: self._looked(name, process))

    def _looked(self, name: str, process: int) -> None:
        """Again until it is in a view, or may make one."""
        world, peer = self.world, self.world.peers[name]
        if peer.process != process or peer.view is not None:
            return
        others = [it for it in world.peers.values() if it is not peer and it.alive]
        lets_in = any(
            it.view is not None and not world.network.is_cut(name, it.name) for it in others
        )
        whole = len(peer.disk[-1].states) == world.workload.layer_count if peer.disk else False
        agreement = peer.agreement
        is_free = not agreement.attempting and agreement.next_view is None
        if not lets_in and is_free and (whole or name == FOUNDER):
            world.tell(name, "goes on alone")
            world.found(name)
        world.after(SECOND_NS, lambda: self._looked(name, process))

    def are_together(self) -> bool:
        views = {peer.view.id if peer.view else None for peer in self.world.peers.values()}
        view = self.world.peers[FOUNDER].view
        return (
            len(views) == 1
            and view is not None
            and isinstance(view.plan, Plan)
            and list(view.member_ids) == self.names
        )

    def comes_together(self) -> None:
        world = self.world
        world.run_until(self.are_together, TOGETHER_WITHIN_S)
        step = min(peer.agreement.step for peer in world.peers.values())
        world.run_until(
            lambda: min(peer.agreement.step for peer in world.peers.values()) >= step + 3
        )


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_power_cut_leaves_one_swarm(seed: int) -> None:
    """Twice in a row: the second time they remember views of the time before the first."""
    swarm = PowerCut(seed)
    swarm.world.run_until(swarm.are_together)
    for apart in (seed % 2 == 1, seed % 4 > 1):
        swarm.train_for(20)
        swarm.strike(apart)
        swarm.comes_together()
