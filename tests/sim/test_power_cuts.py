"""All of a swarm ends at once, and its peers come back in any order, one after another, as daemons
do. Each looks for the others, and waits a while for those it trained with last. It goes on from the
newest checkpoint that those present make up."""

import itertools
import random
from dataclasses import replace

import pytest

from p2p_dtfm.core.consensus.actions import SECOND_NS
from p2p_dtfm.core.membership.fellows import FELLOWS_WAIT_NS, is_worth_a_return
from p2p_dtfm.core.protocol.plan import Plan
from p2p_dtfm.core.protocol.workload import LayerCost, Workload
from p2p_dtfm.sim.faults.agreement_seeds import TIMING
from p2p_dtfm.sim.faults.agreement_world import AgreementWorld
from p2p_dtfm.sim.faults.drawn_plans import any_plan
from p2p_dtfm.sim.faults.lossy_network import LossyNetwork
from p2p_dtfm.sim.faults.simulated_peer import SimulatedPeer
from p2p_dtfm.sim.faults.simulated_process import CHECKPOINT_STEPS, SimulatedCheckpoint
from tests.core.builders import record

COST = LayerCost(1, 1, 1, 1)
SEEDS = [*range(4), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(4, 16))]
"""These cover all four ways to be struck twice, together or one after another."""
LOOKS_S = 6
"""Seconds for which a daemon looks for members before it goes on alone."""
TOGETHER_WITHIN_S = 60
SOON_S = 15
"""A peer that is back this many seconds after the first one counts as present."""
FOUNDER = "p0"


class Saver(SimulatedPeer):
    """A peer that acts as a daemon. It fetches the layers of others' checkpoints if it makes some
    itself. It comes back with nothing in memory but what it goes on from."""

    def checkpoint(self, step: int, lineage: str) -> None:
        super().checkpoint(step, lineage)
        self.later(SECOND_NS, lambda: self._complete(step, lineage))

    def _complete(self, step: int, lineage: str) -> None:
        mine = next((it for it in self.disk if (it.step, it.lineage) == (step, lineage)), None)
        if mine is None:
            return
        for peer in self.world.peers.values():
            for theirs in peer.disk:
                if (theirs.step, theirs.lineage) == (step, lineage):
                    mine.states.update(theirs.states)
        self.say_saved()

    def restart(self) -> None:
        super().restart()
        self.states = {}
        self.agreement.resume(0, {}, "", self.agreement.recovery_evidence.saved)

    @property
    def whole(self) -> SimulatedCheckpoint | None:
        """The newest checkpoint of all layers."""
        count = self.world.workload.layer_count
        whole = (it for it in reversed(self.disk) if len(it.states) == count)
        return max(whole, key=lambda it: it.step, default=None)

    def go_on_from_disk(self) -> None:
        if (found := self.whole) is not None:
            self.states = dict(found.states)
            saved = self.agreement.recovery_evidence.saved
            self.agreement.resume(found.step, self._held(), found.lineage, saved)


class CutWorld(AgreementWorld):
    """A world that remembers how far back training has gone since the strike."""

    peer_type = Saver
    lowest_step = 0

    def committed(self, name: str, step: int) -> None:
        super().committed(name, step)
        self.lowest_step = min(self.lowest_step, step)


class PowerCut:
    """A swarm that loses power. `apart`: two halves do not see each other for a while after the
    peers come back."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.names = [f"p{number}" for number in range(self.chance.randint(2, 5))]
        workload = Workload(2, 8, 0, 1, COST, COST, COST, self.chance.choice((1, 1, 2)))
        network = LossyNetwork(
            delay_ns=(1_000_000, 60_000_000), loss=self.chance.choice((0.0, 0.01))
        )
        timing = replace(TIMING, orphan_ns=0)
        self.world = CutWorld(seed, workload, record("template"), any_plan, network, timing)
        self.world.rejoins = True
        self.waiting: dict[str, int] = {}
        """For each peer about to go on: until when it waits for others."""
        for name in self.names:
            self.world.add_peer(name).agreement.wants_view()
        self.world.after(3 * SECOND_NS, lambda: self.world.found(FOUNDER))

    def train_for(self, seconds: int) -> None:
        self.world.run_to(self.world.now_ns + seconds * SECOND_NS)

    def strike(self, apart: bool, goes_early: bool = False) -> int:
        """Peers come back one after another; the call ends when the last is back, and all see each
        other. Returns the newest step of which those that are back soon have all layers.
        `goes_early`: one died a while before, and is back first."""
        world, chance = self.world, self.chance
        struck = chance.sample(self.names, len(self.names))
        world.crash(struck[0], lose_disk=False)
        if goes_early:
            self.train_for(15)
        for name in struck[1:]:
            world.crash(name, lose_disk=False)
        self.waiting = {}
        heal = world.cut(self._halves() if apart else (), "halves")
        world.tell("world", "POWER CUT")
        at_s = first_s = chance.randint(1, 5)
        soon = []
        for name in struck if goes_early else chance.sample(self.names, len(self.names)):
            soon += [world.peers[name]] if at_s - first_s < SOON_S else []
            world.after(at_s * SECOND_NS, lambda name=name: self._comes_back(name))  # type: ignore[misc]
            at_s += chance.choice((0, 1, 3, 7, 15))
        newest = newest_of(soon, world.workload.layer_count)
        world.lowest_step = world.invariants.furthest
        self.train_for(at_s + 1 + (chance.choice((5, 60)) if apart else 0))
        heal()
        return newest

    def _halves(self) -> set[tuple[str, str]]:
        half = set(self.chance.sample(self.names, len(self.names) // 2))
        pairs = itertools.permutations(self.names, 2)
        return {(one, other) for one, other in pairs if (one in half) != (other in half)}

    def _comes_back(self, name: str) -> None:
        self.world.restart(name)
        process = self.world.peers[name].process
        self.world.after(LOOKS_S * SECOND_NS, lambda: self._looked(name, process))

    def _looked(self, name: str, process: int) -> None:
        """The peer looks again until it is in a view, or may make one."""
        world, peer = self.world, self.world.peers[name]
        assert isinstance(peer, Saver)
        if peer.process != process or peer.view is not None:
            return
        others = [it for it in world.peers.values() if it is not peer and it.alive]
        seen = [it for it in others if not world.network.is_cut(name, it.name)]
        found = next((it for it in seen if it.view is not None or it.name in self.waiting), None)
        agreement = peer.agreement
        if agreement.attempting or agreement.next_view is not None:
            pass
        elif name in self.waiting:
            if not agreement.missing_fellows or world.now_ns >= self.waiting[name]:
                del self.waiting[name]
                self._goes_on(name, "goes on")
        elif found is not None:
            step, members = found.agreement.step, len(found.view.members) if found.view else 0
            own = peer.whole.step if peer.whole is not None else 0
            if is_worth_a_return(own, step, members, CHECKPOINT_STEPS):
                self._goes_on(name, f"does not join {found.name}, which is at step {step}")
        elif peer.whole is not None or name == FOUNDER:
            self.waiting[name] = world.now_ns + FELLOWS_WAIT_NS
        world.after(SECOND_NS, lambda: self._looked(name, process))

    def _goes_on(self, name: str, what: str) -> None:
        self.world.tell(name, what)
        peer = self.world.peers[name]
        assert isinstance(peer, Saver)
        peer.go_on_from_disk()
        self.world.found(name)

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


def newest_of(peers: list[SimulatedPeer], layer_count: int) -> int:
    """The newest step of which these peers have all layers on their disks."""
    saved: dict[tuple[int, str], set[int]] = {}
    for checkpoint in (it for peer in peers for it in peer.disk):
        saved.setdefault((checkpoint.step, checkpoint.lineage), set()).update(checkpoint.states)
    return max((step for (step, _), it in saved.items() if len(it) == layer_count), default=0)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_power_cut_leaves_one_swarm(seed: int) -> None:
    """Power fails twice in a row: the second time the peers remember views of the time before the
    first."""
    swarm = PowerCut(seed)
    swarm.world.run_until(swarm.are_together)
    for apart in (seed % 2 == 1, seed % 4 > 1):
        swarm.train_for(20)
        newest = swarm.strike(apart)
        swarm.comes_together()
        assert apart or swarm.world.lowest_step >= newest, "they were thrown back further than that"


@pytest.mark.parametrize("seed", SEEDS[:8])
def test_who_died_first_and_is_back_first_throws_nobody_back(seed: int) -> None:
    """Its disk is older than the others'."""
    swarm = PowerCut(seed)
    swarm.world.run_until(swarm.are_together)
    swarm.train_for(20)
    newest = swarm.strike(apart=False, goes_early=True)
    swarm.comes_together()
    assert swarm.world.lowest_step >= newest
