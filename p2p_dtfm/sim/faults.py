"""A seeded schedule of faults for a world."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_dtfm.core.actions import SECOND_NS
from p2p_dtfm.core.plan import Plan
from p2p_dtfm.sim.agreement_world import AgreementWorld
from p2p_dtfm.sim.network import Link
from p2p_dtfm.sim.simulated_peer import SimulatedPeer

CRASHES = ("crash", "crash and lose disk")
CUTS = ("partition", "isolate", "one way", "one link")
KINDS = (*CRASHES, *CRASHES, "stop", "stop", "slow", "join", "leave", *CUTS, "bad network")


@dataclass
class Faults:
    """What a seed inflicts. A `careful` one crashes peers only where every layer has a copy left,
    and cuts no links: then no committed step may ever be lost.
    """

    world: AgreementWorld
    chance: random.Random
    careful: bool
    inflicted: dict[str, int] = field(default_factory=dict)
    recoveries_ns: list[int] = field(default_factory=list)
    """From a crash to the next committed step."""
    _heals: list[Callable[[], None]] = field(default_factory=list)
    _next_name: int = 0

    def schedule(self, count: int, from_ns: int, to_ns: int) -> None:
        for _ in range(count):
            delay_ns = self.chance.randrange(from_ns, to_ns) - self.world.now_ns
            kind = self.chance.choice(KINDS)
            self.world.after(delay_ns, lambda kind=kind: self._inflict(kind))  # type: ignore[misc]

    def end(self) -> None:
        """No more faults: links heal, who was stopped goes on, who crashed starts again."""
        for heal in self._heals:
            heal()
        self.world.network.become_good()
        for name, peer in self.world.peers.items():
            if not peer.alive:
                self.world.restart(name)
            peer.slowness = 1.0
            self.world.go_on(name)

    # one fault ----------------------------------------------------------------------------------

    def _inflict(self, kind: str) -> None:
        running = [p for p in self._present() if p.alive and not p.stopped]
        if kind in CUTS and self.careful:
            kind = "slow"
        if kind in CRASHES and self.careful and not self._has_copies():
            kind = "stop"
        if not running:
            return
        peer = self.chance.choice(running)
        if kind == "leave" and len(running) <= 3:
            kind = "join"
        if kind == "join" and len(self._present()) >= 16:
            return
        self.inflicted[kind] = self.inflicted.get(kind, 0) + 1
        after_ns = self.chance.randrange(2 * SECOND_NS, 40 * SECOND_NS)
        self._do(kind, peer, after_ns)

    def _do(self, kind: str, peer: SimulatedPeer, after_ns: int) -> None:
        world, name = self.world, peer.name
        if kind in CRASHES:
            world.crash(name, lose_disk=kind == CRASHES[1])
            self._watch_recovery()
            world.after(after_ns, lambda: world.restart(name))
        elif kind == "stop":
            world.stop(name)
            world.after(after_ns, lambda: world.go_on(name))
        elif kind == "slow":
            peer.slowness = self.chance.choice((3.0, 10.0))
            world.tell(name, "becomes slow")
            world.after(after_ns, lambda: setattr(peer, "slowness", 1.0))
        elif kind == "join":
            self._next_name += 1
            joiner = world.add_peer(f"n{self._next_name:02}")
            joiner.agreement.wants_view()
            world.tell(joiner.name, "STARTS")
        elif kind == "leave":
            if peer.view is not None:
                world.tell(name, "WANTS TO LEAVE")
                world.leave(name)
        elif kind == "bad network":
            self._worsen(after_ns)
        else:
            heal = world.cut(self._links(kind, name), f"{kind} {name}")
            self._heals.append(heal)
            world.after(after_ns, heal)

    def _worsen(self, after_ns: int) -> None:
        network = self.world.network
        before = network.loss, network.late

        def better() -> None:
            network.loss, network.late = min(before[0], network.loss), min(before[1], network.late)

        network.loss, network.late = 0.15, 0.1
        self.world.tell("network", "becomes bad")
        self.world.after(after_ns, better)

    def _links(self, kind: str, name: str) -> set[Link]:
        others = [other for other in self.world.peers if other != name]
        if kind == "isolate":
            return {(name, other) for other in others} | {(other, name) for other in others}
        if kind == "one way":
            outward = self.chance.random() < 0.5
            return {(name, other) if outward else (other, name) for other in others}
        if kind == "one link" and others:
            other = self.chance.choice(others)
            return {(name, other), (other, name)} if self.chance.random() < 0.5 else {(name, other)}
        half = {other for other in self.world.peers if self.chance.random() < 0.5}
        peers = list(self.world.peers)
        return {(a, b) for a in peers for b in peers if (a in half) != (b in half)}

    def _watch_recovery(self) -> None:
        crashed_ns = self.world.now_ns
        commits = self.world.invariants.commit_count

        def look() -> None:
            if self.world.invariants.commit_count > commits:
                self.recoveries_ns.append(self.world.last_commit_ns - crashed_ns)
            elif self.world.now_ns - crashed_ns < 60 * SECOND_NS:
                self.world.after(SECOND_NS // 20, look)

        commits = self.world.invariants.commit_count
        self.world.after(SECOND_NS // 20, look)

    def _present(self) -> list[SimulatedPeer]:
        return [peer for peer in self.world.peers.values() if not peer.left]

    def _has_copies(self) -> bool:
        """All are well and in one view, and two of them have each layer's newest state."""
        peers = self._present()
        if any(not p.alive or p.stopped or p.agreement.frozen or not p.view for p in peers):
            return False
        if len({p.view.id for p in peers if p.view}) > 1:
            return False
        view = peers[0].view
        if view is None or not isinstance(view.plan, Plan):
            return False
        head = self.world.invariants.furthest - 1
        for layer in range(self.world.workload.layer_count):
            copies = [p for p in peers if p.can_reach(layer, head)]
            if len(copies) < 2:
                return False
        return True
